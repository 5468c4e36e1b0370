"""The float32 kernels' part of the problem: it meets what was measured, and its constraints are named."""

import statistics
from dataclasses import replace

import pytest
from test_kernel_config import H200, config, held, spec

from flashrnn_deploy.kernel_config import check, predict, solve

# Measured on an H200, T = 1024, us per step: (cell, heads, head_dim, batch), and the configuration that was measured.
MEASURED_FLOAT = {
    ("lstm", 1, 64, 1): (0.284, config("local", 64, 64, 1, 4, 1, 4)),
    ("lstm", 12, 64, 16): (0.381, config("local", 64, 64, 2, 4, 1, 4)),
    ("lstm", 1, 128, 1): (0.389, config("cluster", 128, 32, 1, 4, 1, 8)),
    ("lstm", 6, 128, 16): (0.724, config("cluster", 128, 64, 2, 8, 1, 8)),
    ("lstm", 1, 256, 1): (0.536, config("cluster", 256, 16, 1, 4, 1, 16)),
    ("lstm", 1, 256, 16): (0.861, config("cluster", 256, 32, 2, 8, 1, 16)),
    ("lstm", 3, 256, 16): (1.376, config("cluster", 256, 32, 4, 8, 1, 16)),
    ("lstm", 1, 512, 1): (1.004, config("cluster", 512, 32, 1, 8, 1, 24)),
    ("lstm", 1, 512, 16): (2.549, config("cluster", 512, 32, 4, 8, 1, 16)),
    ("slstm", 1, 256, 1): (0.576, config("cluster", 256, 16, 1, 4, 1, 16)),
    ("gru", 1, 64, 1): (0.234, config("local", 64, 64, 1, 4, 1, 4)),
    ("gru", 1, 256, 1): (0.452, config("cluster", 256, 32, 1, 4, 1, 16)),
    ("gru", 1, 512, 16): (2.070, config("cluster", 512, 32, 4, 8, 1, 24)),
    ("elman", 1, 64, 1): (0.179, config("local", 64, 64, 1, 2, 1, 4)),
    ("elman", 1, 512, 1): (0.507, config("cluster", 512, 32, 1, 4, 1, 32)),
    ("lstm", 1, 384, 16): (1.721, config("cluster", 384, 24, 4, 6, 1, 16)),
    ("gru", 1, 384, 16): (1.424, config("cluster", 384, 24, 4, 6, 1, 24)),
    ("slstm", 1, 384, 16): (1.757, config("cluster", 384, 24, 4, 6, 1, 16)),
    ("lstm", 1, 768, 1): (1.139, config("grid", 768, 8, 1, 8, 1, 48, PF=4, REP=4)),
    ("lstm", 1, 1024, 1): (1.302, config("grid", 1024, 8, 1, 8, 1, 64, PF=4, REP=4)),
    ("lstm", 1, 1024, 16): (7.170, config("grid", 1024, 16, 4, 8, 1, 32, PF=4)),
    ("slstm", 1, 1024, 1): (1.264, config("grid", 1024, 8, 1, 8, 1, 64, PF=4, REP=4)),
    ("gru", 1, 1024, 1): (1.359, config("grid", 1024, 8, 1, 8, 1, 64, PF=4, REP=4)),
    ("elman", 1, 1024, 16): (4.052, config("grid", 1024, 16, 4, 8, 1, 64, PF=4)),
}


# The same, grid mode, more than one row in a tile.
MEASURED_TILES = [
    ("gru", 384, 1.459, config("grid", 384, 32, 2, 8, 1, 24)),
    ("lstm", 512, 2.214, config("grid", 512, 16, 4, 8, 1, 32, REP=2)),
    ("gru", 512, 1.749, config("grid", 512, 32, 2, 8, 1, 24)),
    ("slstm", 512, 2.171, config("grid", 512, 16, 4, 8, 1, 32, REP=2)),
    ("lstm", 768, 4.698, config("grid", 768, 16, 8, 8, 1, 16)),
    ("gru", 768, 4.012, config("grid", 768, 16, 8, 8, 1, 32)),
    ("slstm", 768, 4.852, config("grid", 768, 16, 8, 8, 1, 16)),
    ("elman", 768, 1.659, config("grid", 768, 64, 2, 8, 1, 40)),
    ("lstm", 1024, 6.643, config("grid", 1024, 16, 4, 8, 1, 32, REP=2)),
    ("gru", 1024, 4.833, config("grid", 1024, 16, 8, 8, 1, 32)),
    ("slstm", 1024, 7.389, config("grid", 1024, 16, 4, 8, 1, 32, REP=2)),
    ("elman", 1024, 2.119, config("grid", 1024, 64, 2, 8, 1, 40)),
]


@pytest.mark.parametrize(("shape", "measured"), MEASURED_FLOAT.items(), ids=lambda v: "-".join(map(str, v[:4])))
def test_the_model_meets_measured_float32_kernels(shape, measured):
    cell, heads, head_dim, batch = shape
    layer = spec(cell, heads, head_dim, "float32")
    own = predict(layer, batch, H200, measured[1])
    assert own.predicted_step_us == pytest.approx(measured[0], rel=0.12)
    assert not own.estimate
    assert [name for name, held in check(layer, batch, H200, measured[1]).items() if not held] == []
    assert solve(layer, batch, H200).predicted_step_us <= own.predicted_step_us


def test_the_model_meets_tiles_of_several_rows_in_the_grid_mode():
    errors = []
    for cell, head_dim, measured, chosen in MEASURED_TILES:
        layer = spec(cell, head_dim=head_dim, dtype="float32")
        assert all(check(layer, 16, H200, chosen).values())
        errors.append(abs(predict(layer, 16, H200, chosen).predicted_step_us / measured - 1))
    assert max(errors) < 0.06
    assert statistics.mean(errors) < 0.03


@pytest.mark.parametrize("cell", ["lstm", "gru", "slstm"])
def test_a_cluster_of_16_is_chosen_where_it_was_measured_faster_than_the_grid(cell):
    chosen = solve(spec(cell, head_dim=384, dtype="float32"), 16, H200).config
    assert chosen == MEASURED_FLOAT[cell, 1, 384, 16][1]


def test_float32_has_constraints_of_its_own():
    layer = spec(head_dim=256, dtype="float32")
    good = MEASURED_FLOAT["lstm", 1, 256, 16][1]
    assert all(check(layer, 16, H200, good).values())
    changes = {
        "whole_slices": {"units_per_block": 24},
        "whole_vectors": {"register_k_steps": 14},
        "one_pair_per_lane": {"row_warps": 1, "batch_tile": 2},
        "whole_messages": {"units_per_block": 16},
        "register_k_steps_exist": {"register_k_steps": 18},
        "registers": {"row_warps": 2},
        "spare_warp": {"spare_warp": 1},
        "grid_tested_range": {"mode": "grid", "row_warps": 4},
    }
    for name, change in changes.items():
        assert not held(layer, 16, replace(good, **change))[name], name
    three_units_a_lane = config("grid", 768, 24, 2, 8, 1, 24, PF=4)
    assert not held(spec(head_dim=768, dtype="float32"), 16, three_units_a_lane)["whole_slices"]
