"""Packed sequences in an export: the padded tensor and its lengths travel together, and the op takes both.

torch.export refuses ``PackedSequence``. While ``stand_ins`` is open, ``pack_padded_sequence`` returns a ``Packed``, a
layer takes and returns one, and ``pad_packed_sequence`` takes it apart. Two things differ from torch:

* the padded result has as many steps as the padded input, where torch cuts it to the longest length (a length of the
  result that depends on the *values* of an input is beyond most engines). Steps behind a row's end hold the padding
  value in both. A model that computes something else from the missing steps, a mean over time for example, fails the
  comparison with the module and is refused; ``total_length=x.shape[1]`` makes both the same;
* lengths need not be sorted, ``enforce_sorted`` or not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.utils import rnn

from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters.layer_calls import record_cut, record_lengths, user_line
from flashrnn_deploy.exporters.replaced import replaced_code


class Packed(rnn.PackedSequence):
    """Stands for a PackedSequence, and passes ``isinstance``; its fields do not exist in an export.

    ``x`` is padded, [B, T, ...] if ``batch_first``; ``lens`` [B] are its valid steps.
    """

    x: Tensor
    lens: Tensor
    batch_first: bool
    clean: bool
    """Everything behind a row's end is zero."""

    def __new__(cls, x: Tensor, lens: Tensor, batch_first: bool, clean: bool = False) -> Packed:
        self: Packed = tuple.__new__(cls, (None, None, None, None))
        self.x, self.lens, self.batch_first, self.clean = x, lens, batch_first, clean
        return self

    def padded(self, batch_first: bool) -> Tensor:
        """``x`` in the given layout."""
        return self.x if batch_first == self.batch_first else self.x.transpose(0, 1)

    def with_padded(self, y: Tensor, batch_first: bool) -> Packed:
        """The same lengths with the ``y`` of a layer."""
        return Packed(y, self.lens, batch_first, clean=True)

    def _refuse(self, *_: Any) -> Any:
        raise FlashRNNError(
            f"the fields and methods of a PackedSequence do not exist in an export{user_line()}; "
            "unpack it with pad_packed_sequence first"
        )

    data = batch_sizes = sorted_indices = unsorted_indices = property(_refuse)  # its methods read these
    __iter__ = __getitem__ = __len__ = _refuse


def pack(input: Tensor, lengths: Any, batch_first: bool) -> Packed:
    """``pack_padded_sequence``.

    Raises:
        FlashRNNError: the lengths are Python numbers, which a file would freeze.
    """
    if not isinstance(lengths, Tensor):
        raise FlashRNNError(
            f"pack_padded_sequence{user_line()} got its lengths as Python numbers, which the file would freeze; make "
            "them a tensor argument of forward and pass it on as it is"
        )
    record_lengths(lengths)
    return Packed(input, lengths, batch_first)


def pad(packed: Any, batch_first: bool, padding_value: float, total_length: Any) -> tuple[Tensor, Tensor]:
    """``pad_packed_sequence``: all steps of the padded input, or ``total_length`` of them."""
    if not isinstance(packed, Packed):
        raise FlashRNNError(
            f"pad_packed_sequence{user_line()} got a {type(packed).__name__} that was not packed inside of forward; "
            "pass a padded tensor and its lengths to forward, and pack them there"
        )
    if total_length is None:
        record_cut()
    x = packed.padded(batch_first)
    time = 1 if batch_first else 0
    if total_length is not None and not statically_known_true(total_length == x.shape[time]):
        shape = [*x.shape[:time], total_length, *x.shape[time + 1 :]]
        x = torch.cat([x, x.new_zeros(shape)], time).narrow(time, 0, total_length)
    if not packed.clean or padding_value:
        valid = torch.arange(x.shape[time], device=x.device)[:, None] < packed.lens
        valid = valid.transpose(0, 1) if batch_first else valid
        x = torch.where(valid.reshape(*valid.shape, *[1] * (x.dim() - 2)), x, padding_value)
    return x, packed.lens.to(torch.int64)


def refuse(name: str) -> Any:
    raise FlashRNNError(f"{name}{user_line()} cannot be exported; use pack_padded_sequence with a tensor of lengths")


# The functions below run in place of torch's, with torch's globals: they import what they need.


def _pack_padded_sequence(input, lengths, batch_first=False, enforce_sorted=True):  # type: ignore[no-untyped-def]
    from flashrnn_deploy.exporters.torch_packed import pack

    return pack(input, lengths, batch_first)


def _pad_packed_sequence(sequence, batch_first=False, padding_value=0.0, total_length=None):  # type: ignore[no-untyped-def]
    from flashrnn_deploy.exporters.torch_packed import pad

    return pad(sequence, batch_first, padding_value, total_length)


def _pack_sequence(sequences, enforce_sorted=True):  # type: ignore[no-untyped-def]
    from flashrnn_deploy.exporters.torch_packed import refuse

    return refuse("pack_sequence")


def _unpack_sequence(packed_sequences):  # type: ignore[no-untyped-def]
    from flashrnn_deploy.exporters.torch_packed import refuse

    return refuse("unpack_sequence")


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Replace torch's functions while open."""
    with contextlib.ExitStack() as stack:
        for function, stand_in in (
            (rnn.pack_padded_sequence, _pack_padded_sequence),
            (rnn.pad_packed_sequence, _pad_packed_sequence),
            (rnn.pack_sequence, _pack_sequence),
            (rnn.unpack_sequence, _unpack_sequence),
        ):
            stack.enter_context(replaced_code(function, stand_in))
        yield
