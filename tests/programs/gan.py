"""A GAN, in the manner of dcgan.

--ngpu, nn.parallel.data_parallel in forward, two optimizers, weights_init.
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.parallel
import torch.optim as optim

parser = argparse.ArgumentParser()
parser.add_argument("--niter", type=int, default=1)
parser.add_argument("--ngpu", type=int, default=1)
parser.add_argument("--nz", type=int, default=6)
opt = parser.parse_args()
print(opt)
torch.manual_seed(999)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def weights_init(m):
    if m.__class__.__name__.find("Conv") != -1:
        torch.nn.init.normal_(m.weight, 0.0, 0.02)
    elif m.__class__.__name__.find("BatchNorm") != -1:
        torch.nn.init.normal_(m.weight, 1.0, 0.02)
        torch.nn.init.zeros_(m.bias)


class Parallel(nn.Module):
    def __init__(self, ngpu, *layers):
        super().__init__()
        self.ngpu, self.main = ngpu, nn.Sequential(*layers)

    def forward(self, input):
        if input.is_cuda and self.ngpu > 1:
            self.went = "parallel"
            return nn.parallel.data_parallel(self.main, input, range(self.ngpu))
        self.went = "alone"
        return self.main(input)


netG = Parallel(
    opt.ngpu,
    *(
        nn.ConvTranspose2d(opt.nz, 8, 4, 1, 0, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(True),
    ),
    *(nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False), nn.Tanh()),
).to(device)
netD = Parallel(
    opt.ngpu,
    *(nn.Conv2d(3, 8, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)),
    *(nn.Conv2d(8, 1, 4, 1, 0, bias=False), nn.Flatten(0), nn.Sigmoid()),
).to(device)
netG.apply(weights_init)
netD.apply(weights_init)
criterion = nn.BCELoss()
fixed_noise = torch.randn(8, opt.nz, 1, 1, device=device)
optimizerD = optim.Adam(netD.parameters(), lr=0.0002, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=0.0002, betas=(0.5, 0.999))
for epoch in range(opt.niter):
    for i, real in enumerate(torch.randn(3, 8, 3, 8, 8)):
        netD.zero_grad()
        real_cpu = real.to(device)
        label = torch.full((real_cpu.size(0),), 1, dtype=real_cpu.dtype, device=device)
        errD_real = criterion(netD(real_cpu), label)
        errD_real.backward()
        fake = netG(torch.randn(8, opt.nz, 1, 1, device=device))
        label.fill_(0)
        errD_fake = criterion(netD(fake.detach()), label)
        errD_fake.backward()
        optimizerD.step()
        netG.zero_grad()
        label.fill_(1)
        errG = criterion(netD(fake), label)
        errG.backward()
        optimizerG.step()
        print(
            f"[{epoch}/{opt.niter}][{i}] Loss_D: {(errD_real + errD_fake).item():.4f} "
            f"Loss_G: {errG.item():.4f}"
        )
assert netG(fixed_noise).device == device and netG.went == (
    "parallel" if opt.ngpu > 1 else "alone"
)
