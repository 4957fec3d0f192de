"""Two towers with shared weights, and a part of them on a second GPU."""

import torch
import torch.nn as nn


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8)
        ).cuda(0)
        self.head = nn.Sequential(
            nn.Linear(16, 8), nn.ReLU(inplace=True), nn.Linear(8, 1), nn.Sigmoid()
        ).cuda(1)

    def forward(self, input1, input2):
        both = torch.cat((self.tower(input1), self.tower(input2)), 1)
        return self.head(both.to("cuda:1", non_blocking=True))
