"""The contracts between the core and its plugins: the only package of the core that every other floor may name.

`components` holds the base class of each kind; `model`, `data`, `optimizer` and `runtime` base classes and protocols of
what components build; `contexts` what a component, a hook or an evaluation receives; `hookspecs` the hook
specifications; `layout` the degrees of parallelism; `errors` the exceptions. Nothing here names a class of a higher
floor, except the job that `problems(job, …)` receives, and only for type checkers.
"""
