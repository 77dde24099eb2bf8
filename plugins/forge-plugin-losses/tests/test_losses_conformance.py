"""`chunked_cross_entropy` keeps the contracts of its kind."""

from __future__ import annotations

from forge_plugin_losses import ChunkedCrossEntropy
from forge_testing.suites import LossSuite


class TestChunkedCrossEntropy(LossSuite):
    component = ChunkedCrossEntropy(chunk_tokens=5)
    variants = (ChunkedCrossEntropy(chunk_tokens=1), ChunkedCrossEntropy(chunk_tokens=1000))


class TestChunkedCrossEntropyWithZLoss(LossSuite):
    component = ChunkedCrossEntropy(chunk_tokens=7, z_loss=1e-2)
    layouts = ("tp2",)

    def objective(self, logits, labels):
        return self.reported(logits, labels) + 1e-2 * logits.logsumexp(-1).square()


class TestSmoothedChunkedCrossEntropy(LossSuite):
    component = ChunkedCrossEntropy(chunk_tokens=5, label_smoothing=0.1)
    layouts = ("tp2",)

    def objective(self, logits, labels):
        uniform = -logits.log_softmax(-1).mean(-1)
        return 0.9 * self.reported(logits, labels) + 0.1 * uniform
