"""The head: log probabilities and entropies without the logits of a whole batch."""

import pytest
import torch
from torch.nn.functional import linear, log_softmax

from paceline.model import head as module
from paceline.model.head import logprobs_and_entropy


def plain(hidden, weight, targets, temperatures):
    logp = log_softmax(linear(hidden, weight) / temperatures[:, None], -1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("rows", [2, 100])
def test_log_probabilities_entropies_and_their_gradients_are_those_of_whole_logits(monkeypatch, rows):
    torch.manual_seed(rows)
    monkeypatch.setitem(module.ELEMENTS, "cpu", rows * 11)
    hidden, weight = torch.randn(7, 5, dtype=torch.float64), torch.randn(11, 5, dtype=torch.float64)
    targets, temperatures = torch.randint(11, (7,)), torch.rand(7, dtype=torch.float64) + 0.5
    mixing = torch.randn(2, 7, dtype=torch.float64)
    results = []
    for function in (logprobs_and_entropy, plain):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        values = torch.stack(function(h, w, targets, temperatures))
        (values * mixing).sum().backward()
        results.append((values.detach(), h.grad, w.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_frozen_matrix_gets_no_gradient():
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(6, 4)
    logprobs_and_entropy(hidden, weight, torch.tensor([0, 5, 2]), torch.ones(3))[0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
