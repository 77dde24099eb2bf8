"""`diloco` and `local_sgd` against their papers' algorithms, computed by plain torch in one process."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torchft", reason="torchft is not installed: it has wheels for Linux")

from torchft_groups import Group, Lighthouse, OneProcess, Watch, apart, group_job, pick, plain_job

from forge_plugin_torchft import DiLoCo, LocalSGD

STEPS = 8


def by_paper(tmp_path, sync_every, meet, dead_from=STEPS + 1):
    """Two workers, each on its rows; after every `sync_every` steps `meet(workers)` sets their weights.

    From the step `dead_from` on there is only the first one.
    """
    workers = [OneProcess(plain_job(tmp_path, train={"steps": STEPS}), tmp_path) for _ in range(2)]
    if isinstance(meet, Outer):
        meet.begin(workers[0].weights)
    for step in range(1, STEPS + 1):
        if step == dead_from:
            workers.pop()
        for group, worker in enumerate(workers):
            worker.gradients(pick(worker.rows(), [group], 2))
            worker.update()
        if step % sync_every == 0:
            meet(workers, step)
    return [worker.weights for worker in workers]


class Outer:
    """Algorithm 1 of Douillard et al. 2023: Δ = mean(θ(t-1) - θi), θ(t) by torch's SGD with Nesterov momentum."""

    def __init__(self, lr, momentum, fragments):
        self.lr, self.momentum, self.fragments = lr, momentum, fragments

    def begin(self, weights):
        self.outer = {name: torch.nn.Parameter(weight) for name, weight in weights.items()}
        names, sizes = list(weights), [weight.numel() for weight in weights.values()]
        first = [name for i, name in enumerate(names) if sum(sizes[:i]) < sum(sizes) / self.fragments]
        self.parts = [part for part in (first, [name for name in names if name not in first]) if part]
        parameters = [[self.outer[name] for name in part] for part in self.parts]
        self.sgd = [torch.optim.SGD(part, self.lr, self.momentum, nesterov=True) for part in parameters]

    def __call__(self, workers, step):
        number = (step * self.fragments // 4 - 1) % self.fragments  # each part every 4 steps
        for name in self.parts[number]:
            start = self.outer[name]
            changes = [start.detach() - worker.weights[name] for worker in workers]
            start.grad = sum(changes) / len(changes)
        self.sgd[number].step()
        for worker in workers:
            for name, parameter in worker.run.model.named_parameters():
                if name in self.parts[number]:
                    parameter.data.copy_(self.outer[name])


def groups_with(tmp_path, hook):
    with Lighthouse() as address:
        jobs = [group_job(tmp_path, address, n, train={"steps": STEPS}, hooks={"outer": hook}) for n in (0, 1)]
        groups = [Group(job) for job in jobs]
        return [group.wait() for group in groups], groups


@pytest.mark.parametrize("fragments", [1, 2])
def test_diloco_is_the_algorithm_of_its_paper(tmp_path, fragments):
    weights, groups = groups_with(tmp_path, DiLoCo(sync_every=4, fragments=fragments))
    expected = apart(lambda: by_paper(tmp_path, 4 // fragments, Outer(0.7, 0.9, fragments)))
    for own, reference in zip(weights, expected, strict=True):
        for name, weight in reference.items():
            torch.testing.assert_close(own[name], weight, rtol=1e-11, atol=1e-12, msg=name)
    assert [line["step"] for line in groups[0].lines() if line.get("participants") == 2][-1] == STEPS


def test_local_sgd_is_the_mean_of_the_weights(tmp_path):
    def meet(workers, step):
        means = {name: (w + workers[1].weights[name]) / 2 for name, w in workers[0].weights.items()}
        for worker in workers:
            for name, parameter in worker.run.model.named_parameters():
                parameter.data.copy_(means[name])

    weights, _ = groups_with(tmp_path, LocalSGD(sync_every=3))
    expected = apart(lambda: by_paper(tmp_path, 3, meet))
    for own, reference in zip(weights, expected, strict=True):
        for name, weight in reference.items():
            torch.testing.assert_close(own[name], weight, rtol=1e-11, atol=1e-12, msg=name)


def test_groups_that_stop_within_a_round_continue_it(tmp_path):
    hook = DiLoCo(sync_every=4)
    with Lighthouse() as address:
        for stop_at in (6, 0):  # two steps after the first agreement
            jobs = [group_job(tmp_path, address, n, train={"steps": STEPS}, hooks={"outer": hook}) for n in (0, 1)]
            groups = [Group(job, Watch(stop_at=stop_at)) for job in jobs]
            weights = [group.wait() for group in groups]
    expected = apart(lambda: by_paper(tmp_path, 4, Outer(0.7, 0.9, 1)))
    for own, reference in zip(weights, expected, strict=True):
        for name, weight in reference.items():
            torch.testing.assert_close(own[name], weight, rtol=1e-11, atol=1e-12, msg=name)


def test_a_group_that_dies_within_a_round_costs_its_own_work_of_it_alone(tmp_path):
    hook = DiLoCo(sync_every=4)
    with Lighthouse() as address:
        jobs = [group_job(tmp_path, address, n, train={"steps": STEPS}, hooks={"outer": hook}) for n in (0, 1)]
        groups = [Group(jobs[0]), Group(jobs[1], Watch(kill_at=7))]
        weights, nothing = [group.wait() for group in groups]
    assert nothing is None
    [expected] = apart(lambda: by_paper(tmp_path, 4, Outer(0.7, 0.9, 1), dead_from=7))
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-11, atol=1e-12, msg=name)
    met = [line["participants"] for line in groups[0].lines() if "participants" in line]
    assert met == [2, 1]
