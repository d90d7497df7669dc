"""Weights come in pieces, and each piece is told of."""

from mlx_troupe.runtime.models import weights
from mlx_troupe.runtime.models.loader import load
from mlx_troupe.runtime.models.resolve import resolve
from tests.models.tiny import build_tiny


def test_weights_are_evaluated_in_pieces(tmp_path, monkeypatch):
    import mlx.core as mx

    sizes = []
    evaluated = mx.eval

    def counting(*arrays):
        sizes.append(sum(part.nbytes for part in arrays[0]))
        evaluated(*arrays)

    monkeypatch.setattr(weights, "PIECE_BYTES", 20_000)
    monkeypatch.setattr(mx, "eval", counting)
    spec = resolve(str(build_tiny("llama", tmp_path / "tiny")))
    heard = []
    loaded = load(spec, evaluated=lambda done, total: heard.append((done, total)))
    pieces = [size for size in sizes if size]
    assert len(pieces) > 3
    largest = max(value.nbytes for value in weights_of(loaded))
    assert max(pieces) < 20_000 + largest
    assert sum(pieces) >= loaded.weight_bytes
    assert heard[-1] == (loaded.weight_bytes, loaded.weight_bytes)
    assert [done for done, _ in heard] == sorted({done for done, _ in heard})


def weights_of(loaded):
    from mlx.utils import tree_flatten

    return [value for _, value in tree_flatten(loaded.model.parameters())]


def test_what_weights_will_take_is_known_before(tmp_path):
    folder = build_tiny("llama", tmp_path / "tiny")
    spec = resolve(str(folder))
    real = load(spec).weight_bytes
    assert real <= weights.resident_bytes(spec) <= 1.2 * real
