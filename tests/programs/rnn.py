"""A word language model with an LSTM.

Repackaged hidden states, .cuda() everywhere, the old tensor types.
"""

import math
import time

import torch
import torch.nn as nn


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid, nlayers):
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(ntoken, ninp)
        self.rnn, self.decoder = (
            nn.LSTM(ninp, nhid, nlayers, dropout=0.2),
            nn.Linear(nhid, ntoken),
        )
        self.nhid, self.nlayers = nhid, nlayers

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        return self.decoder(self.drop(output)).flatten(0, 1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return weight.new_zeros(self.nlayers, bsz, self.nhid), weight.new_zeros(
            self.nlayers, bsz, self.nhid
        )


def repackage_hidden(h):
    return (
        h.detach()
        if isinstance(h, torch.Tensor)
        else tuple(repackage_hidden(v) for v in h)
    )


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous().cuda()


def main():
    torch.manual_seed(1111)
    torch.cuda.manual_seed(1111)
    data = batchify(torch.randint(32, (400,)), 10)
    model = RNNModel(32, 8, 16, 2).cuda()
    criterion, bptt, lr = nn.CrossEntropyLoss().cuda(), 10, 1.0
    hidden, total, start = (
        model.init_hidden(10),
        torch.cuda.FloatTensor([0.0]),
        time.time(),
    )
    model.train()
    batch = 0
    for batch, i in enumerate(range(0, data.size(0) - 1, bptt)):  # noqa: B007
        length = min(bptt, len(data) - 1 - i)
        source, targets = data[i : i + length], data[i + 1 : i + 1 + length].reshape(-1)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(source, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        with torch.no_grad():
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-lr)
        total += loss.data
    torch.cuda.synchronize()
    elapsed, mean = time.time() - start, total.item() / (batch + 1)
    print(
        f"| ms/batch {1000 * elapsed / (batch + 1):5.2f} | loss {mean:5.2f} | ppl "
        f"{math.exp(mean):8.2f}"
    )
    assert isinstance(total, torch.cuda.FloatTensor) and mean < 4
    print(torch.cuda.memory_summary(abbreviated=True))


if __name__ == "__main__":
    main()
