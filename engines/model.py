"""What a runtime must know of a model: special ids, vocabulary, and the names of the tensors.

The names are the contract between the graphs that `exporter` writes and every runtime, in Python
and later in C++:

    ids        int64 [batch, length]          the canvas: prompt, answer so far, padding
    mask       bool  [batch, length]          True where a token is to be attended to
    positions  int64 [batch, asked]           where an answer is wanted, each in [0, length)
    scales     float32 [batch, 1, sites]      statically quantized graphs only: activation scales,
                                              one row of scales for each row of the batch

    serve tail: tokens int64, probability float32, entropy float32 (nats), each [batch, asked]
    trace tail: logits float32 [batch, asked, vocab]
"""

from __future__ import annotations

from dataclasses import dataclass

IDS, MASK, POSITIONS, SCALES = "ids", "mask", "positions", "scales"
TOKENS, PROBABILITY, ENTROPY, LOGITS = "tokens", "probability", "entropy", "logits"
BATCH, LENGTH, ASKED = "batch", "length", "asked"


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Identity of a model, as the export and the bundle record it.

    Attributes:
        name: Folder name of the checkpoint, for people.
        architecture: "llada" or "dream".
        vocab: Size of the logits' last axis; ids are below it.
        mask_id: Stands for "not yet decided"; never predicted, never in a prompt.
        eos_id: Ends an answer; pads.
        max_length: Longest prompt plus answer.
        digest: sha256 over the checkpoint's tensors file(s), hex.
    """

    name: str
    architecture: str
    vocab: int
    mask_id: int
    eos_id: int
    max_length: int
    digest: str

    def __post_init__(self) -> None:
        for name in ("mask_id", "eos_id"):
            if not 0 <= getattr(self, name) < self.vocab:
                raise ValueError(
                    f"0 <= {name} < vocab must hold, got {name}={getattr(self, name)}, "
                    f"vocab={self.vocab}"
                )
        if self.mask_id == self.eos_id:
            raise ValueError(f"mask_id and eos_id must differ, both are {self.mask_id}")
        if self.max_length < 1:
            raise ValueError(f"max_length >= 1 must hold, got {self.max_length}")
