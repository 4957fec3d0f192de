"""tinytrainer, under every strategy of torchstrategy, on the present devices."""

import pytest
import torch
from tinytrainer import Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchstrategy

pytestmark = pytest.mark.usefixtures("no_leaks")


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.fixture
def loader() -> DataLoader:
    torch.manual_seed(1)
    inputs = torch.randn(13, 3)
    # The last batch has 3 rows.
    return DataLoader(TensorDataset(inputs, inputs[:, :2] * 2), batch_size=5)


@pytest.fixture
def plain(loader: DataLoader) -> Trainer:
    """A trainer that was trained without any strategy."""
    trainer = Trainer(build_model, torchstrategy.get_strategy())
    for batch in loader:
        trainer.train_step(batch)
    return trainer


def test_weights_are_those_of_plain_pytorch(
    strategy: torchstrategy.Strategy, loader: DataLoader, plain: Trainer
) -> None:
    trainer = Trainer(build_model, strategy)
    trainer.fit(loader)
    torch.testing.assert_close(trainer.weights(), plain.weights())


@pytest.mark.strategies("central", replicas=[2, 4])
def test_the_loss_goes_down(
    strategy: torchstrategy.Strategy, loader: DataLoader
) -> None:
    first, *_, last = Trainer(build_model, strategy).fit(loader, epochs=20)
    assert last < first / 2


@pytest.mark.strategies("default", "one_device")
@pytest.mark.strategies("central", replicas=[3])
def test_a_checkpoint_goes_back_to_one_device(
    strategy: torchstrategy.Strategy, loader: DataLoader
) -> None:
    trainer = Trainer(build_model, strategy)
    trainer.fit(loader)
    model = build_model()
    model.load_state_dict(trainer.weights())
    assert next(model.parameters()).device.type == "cpu"


class WeightedTrainer(Trainer):
    """Weighs its outputs, with a tensor that stays where it was made."""

    def losses(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return super().losses(batch) * self.weight

    weight: torch.Tensor


@pytest.mark.strategies("central", replicas=[2], places=["sim"])
def test_a_tensor_left_on_the_first_device_is_noticed(
    strategy: torchstrategy.Strategy,
    loader: DataLoader,
    simulated_devices: list[torch.device],
) -> None:
    trainer = WeightedTrainer(build_model, strategy)
    trainer.weight = torch.ones(1, device=simulated_devices[0])
    with pytest.raises(
        RuntimeError, match="Expected all tensors to be on the same device"
    ):
        trainer.fit(loader)


def test_a_trained_model_moves_to_another_device(
    simulated_devices: list[torch.device], plain: Trainer
) -> None:
    before, device = plain.weights(), simulated_devices[-1]
    plain.model.to(device)
    assert plain.model(torch.ones(2, 3, device=device)).device == device
    torch.testing.assert_close(plain.weights(), before)
