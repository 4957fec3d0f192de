"""Image classification, in the manner of pytorch/examples' imagenet.

Argparse, DataParallel, meters, checkpoints.
"""

import argparse
import os
import time

import torch
import torch.nn as nn
import torch.nn.parallel
import torch.optim
import torch.utils.data

parser = argparse.ArgumentParser(description="training of a small network")
parser.add_argument("--epochs", default=1, type=int)
parser.add_argument("-b", "--batch-size", default=16, type=int)
parser.add_argument("--lr", default=0.1, type=float)
parser.add_argument("--gpu", default=None, type=int)
parser.add_argument("--folder", default=".")


class AverageMeter:
    def __init__(self, name):
        self.name, self.sum, self.count = name, 0.0, 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    def __str__(self):
        return f"{self.name} {self.sum / self.count:.4f}"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(2),
        )
        self.classifier = nn.Linear(32, 10)

    def forward(self, x):
        return self.classifier(torch.flatten(self.features(x), 1))


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [
            correct[:k]
            .reshape(-1)
            .float()
            .sum(0, keepdim=True)
            .mul_(100.0 / target.size(0))
            for k in topk
        ]


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Net()
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    device = torch.device("cuda" if args.gpu is None else f"cuda:{args.gpu}")
    if args.gpu is not None:
        torch.cuda.set_device(args.gpu)
        model = model.cuda(args.gpu)
    elif device.type == "cuda":
        model = torch.nn.DataParallel(model).cuda()
    print("=> using", type(model).__name__, "on", torch.cuda.device_count(), "GPUs")
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    torch.backends.cudnn.benchmark = True
    dataset = torch.utils.data.TensorDataset(
        torch.randn(64, 3, 8, 8), torch.randint(10, (64,))
    )
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=args.batch_size, shuffle=True, pin_memory=True
    )
    for epoch in range(args.epochs):
        losses, top1 = AverageMeter("Loss"), AverageMeter("Acc@1")
        end = time.time()
        for images, target in loader:
            images = images.to(device, non_blocking=True)
            target = target.to(device, non_blocking=True)
            output = model(images)
            loss = criterion(output, target)
            acc1, _ = accuracy(output, target, topk=(1, 5))
            losses.update(loss.item(), images.size(0))
            top1.update(acc1[0].item(), images.size(0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        assert time.time() >= end and output.is_cuda and "cuda" in str(output.device)
        print(f"Epoch {epoch}", losses, top1)
    path = os.path.join(args.folder, "checkpoint.pth.tar")
    torch.save(
        {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, path
    )
    checkpoint = torch.load(path, map_location="cuda:0")
    model.load_state_dict(checkpoint["state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer"])


if __name__ == "__main__":
    main()
