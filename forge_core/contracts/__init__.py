"""The contracts between the core and its plugins: the only package of the core that every other floor may name.

`components` holds the base class of each kind, `contexts` what components receive; `model`, `data`, `optimizer` and
`runtime` describe what they build. Nothing names a class of a higher floor, except the job, for type checkers only.
"""
