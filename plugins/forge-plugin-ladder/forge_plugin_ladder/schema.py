"""Schema of what `forge-run ladder fit --json` prints: see `screen.fit_facts`."""

from __future__ import annotations

from forge_kit.tools.output_schema import (
    COUNT,
    INTERVAL,
    NUMBER,
    TEXT,
    array,
    by_name,
    keyed,
    maybe,
    of,
    with_keys,
)
from forge_plugin_ladder.prediction import HeldOut
from forge_plugin_ladder.tuning import Optimum

RULE = dict.fromkeys(("at_reference", "parameters", "tokens", "by_parameters", "by_tokens"), NUMBER)
LAW = keyed(optima=array(of(Optimum)), spread=NUMBER, rule=keyed(**RULE), intervals=by_name(INTERVAL))
# The last two are of an additive law in parameters and tokens
FIT = with_keys(
    keyed(
        law=TEXT,
        source=TEXT,
        count=TEXT,
        points=COUNT,
        losses={"enum": ["held-out", "training"]},
        left_out=by_name(TEXT),
        values=by_name(NUMBER),
        intervals=by_name(INTERVAL),
        resamples=COUNT,
        spread=NUMBER,
        threshold=NUMBER,
        held_out=maybe(of(HeldOut)),
        accuracy=maybe(keyed(values=by_name(NUMBER), spread=NUMBER)),
        iso_flops=keyed(exponent=maybe(NUMBER), warnings=array(TEXT), curves=COUNT),
        tuned=by_name(keyed(law=maybe(LAW), warnings=array(TEXT))),
    ),
    best_size_exponent=NUMBER,
    best_size_interval=INTERVAL,
)
