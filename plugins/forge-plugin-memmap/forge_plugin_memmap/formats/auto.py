"""Format `auto`: whichever recognises a file."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_core.plugins.catalog import Catalog
from forge_plugin_memmap.formats.kind import RAW_HINT, Candidate, TokenFormat
from forge_plugin_memmap.shards import Shard


@cache
def installed_formats() -> dict[str, TokenFormat]:
    """The formats of every installed distribution that recognise their files, by type."""
    catalog = Catalog.installed()
    # By the qualified type: two distributions may have a format of one name
    classes = {offer.type: catalog.load("token_format", offer.qualified) for offer in catalog.offers("token_format")}
    return {type_: cls() for type_, cls in classes.items() if issubclass(cls, TokenFormat) and cls.in_auto}


@frozen(kw_only=True)
class Auto(TokenFormat):
    """The format that recognises a file, by its first bytes or the index beside it. Files of several may be mixed."""

    in_auto = False

    def suffixes(self) -> tuple[str, ...]:
        """The suffixes of all formats."""
        return tuple(sorted({suffix for format in installed_formats().values() for suffix in format.suffixes()}))

    def recognises(self, file: Candidate) -> bool:
        """Whether some format does."""
        return any(format.recognises(file) for format in installed_formats().values())

    def members(self) -> Iterable[TokenFormat]:
        """All that recognise their files."""
        return installed_formats().values()

    def resolve(self, file: Candidate) -> TokenFormat:
        """Returns the one format that recognises the file.

        Raises:
            JobError: none does, or more than one.
        """
        claims = {type_: format for type_, format in installed_formats().items() if format.recognises(file)}
        if len(claims) > 1:
            first, second, *_ = claims
            message = f"{file.path} is recognised as {first}, and as {second}"
            # The job may state the format for all of its files only
            raise JobError(f'{message}; move what does not belong to it, or write format = {{ type = "{first}" }}')
        if not claims:
            reasons = (f"{type_}: {format.refusal(file)}" for type_, format in installed_formats().items())
            # Only formats that the name suggests give a reason
            told = "; ".join(reason for reason in reasons if not reason.endswith(": "))
            known = told or f"no header or index of {', '.join(installed_formats())}"
            raise JobError(f"{file.path} is of no known format ({known}); {RAW_HINT}")
        return next(iter(claims.values()))

    def shard(self, file: Candidate) -> Shard:
        """The shard, by the format that recognises the file."""
        return self.resolve(file).shard(file)
