"""A variational autoencoder.

--no-accel flags, a loader with workers' arguments, a function of one's own.
"""

import argparse

import torch
import torch.utils.data
from torch import nn, optim
from torch.nn import functional as F


class ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.full((1,), ctx.factor, device="cuda"), None


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = (
            nn.Linear(64, 16),
            nn.Linear(16, 4),
            nn.Linear(16, 4),
        )
        self.fc3, self.fc4 = nn.Linear(4, 16), nn.Linear(16, 64)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def forward(self, x):
        h = F.relu(self.fc1(x.view(-1, 64)))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = ScaleGradient.apply(self.reparameterize(mu, logvar), 0.5)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


parser = argparse.ArgumentParser(description="VAE")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--no-cuda", action="store_true", default=False)
args = parser.parse_args()
args.cuda = not args.no_cuda and torch.cuda.is_available()
torch.manual_seed(1)
device = torch.device("cuda" if args.cuda else "cpu")
kwargs = {"num_workers": 0, "pin_memory": True} if args.cuda else {}
loader = torch.utils.data.DataLoader(
    torch.rand(32, 1, 8, 8), batch_size=16, shuffle=True, **kwargs
)
model = VAE().to(device)
optimizer = optim.Adam(model.parameters(), lr=1e-2)
losses = []
for epoch in range(1, args.epochs + 1):
    train_loss = 0
    for data in loader:
        data = data.to(device)
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
    losses.append(train_loss / len(loader.dataset))
    print(f"====> Epoch: {epoch} Average loss: {losses[-1]:.4f}")
with torch.no_grad():
    sample = model.reparameterize(
        torch.zeros(4, 4, device=device), torch.zeros(4, 4, device=device)
    ).cpu()
assert (
    losses[-1] < losses[0]
    and sample.device == torch.device("cpu")
    and device.type == "cuda"
)
