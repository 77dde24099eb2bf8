"""Preference losses under every layout: the curve of one process in float64, with packed rows and a reference."""

from __future__ import annotations

import preference_runs

from forge_plugin_preference import DPO, KTO, SimPO
from forge_testing.curves import same_curve
from forge_testing.laws import Case, layout_law

test_layouts = layout_law(
    Case("dpo", observe=preference_runs.observe(DPO), compare=same_curve, layouts=("tp2", "pp2", "fsdp2_cp2")),
    Case("kto", observe=preference_runs.observe(KTO), compare=same_curve, layouts=("fsdp2", "tp2", "pp2", "cp2")),
    Case("simpo", observe=preference_runs.observe(SimPO()), compare=same_curve, layouts=("cp2",)),
    Case("experts", observe=preference_runs.observe(DPO, experts=True), compare=same_curve, layouts=("fsdp2_ep2",)),
    Case(
        "kto of experts", observe=preference_runs.observe(KTO, experts=True), compare=same_curve, layouts=("fsdp2_ep2",)
    ),
)
