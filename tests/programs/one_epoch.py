"""The smallest one: MNIST's example, with a warm-up on a side stream.

It has a checkpoint of the random state.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.dropout1, self.fc1 = (
            nn.Conv2d(1, 4, 3, 1),
            nn.Dropout(0.25),
            nn.Linear(36, 10),
        )

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        return F.log_softmax(self.fc1(torch.flatten(self.dropout1(x), 1)), dim=1)


def train(model, device, loader, optimizer):
    model.train()
    for batch_idx, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % 2 == 0:
            print(
                f"Train [{batch_idx * len(data)}/{len(loader.dataset)}]\tLoss: "
                f"{loss.item():.6f}"
            )


def test(model, device, loader):
    model.eval()
    test_loss, correct = 0, 0
    with torch.no_grad():
        for data, target in loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            pred = output.argmax(dim=1, keepdim=True)
            correct += pred.eq(target.view_as(pred)).sum().item()
    print(
        f"Test set: Average loss: {test_loss / len(loader.dataset):.4f}, Accuracy: "
        f"{correct}/{len(loader.dataset)}"
    )


def main():
    use_cuda = (
        torch.cuda.is_available()
        and torch.cuda.get_device_properties(0).total_memory > 0
    )
    torch.manual_seed(1)
    device = torch.device("cuda") if use_cuda else torch.device("cpu")
    dataset = torch.utils.data.TensorDataset(
        torch.randn(32, 1, 8, 8), torch.randint(10, (32,))
    )
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=8, shuffle=True, pin_memory=use_cuda
    )
    model = Net().to(device)
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        model(torch.zeros(1, 1, 8, 8, device=device))
    torch.cuda.current_stream().wait_stream(warm_up)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    state = torch.cuda.get_rng_state()
    train(model, device, loader, optimizer)
    test(model, device, loader)
    torch.cuda.set_rng_state(state)
    torch.cuda.empty_cache()
    assert device.type == "cuda" and next(model.parameters()).device == torch.device(
        "cuda", 0
    )


if __name__ == "__main__":
    main()
