"""Checkpoints in an object store: the storage `objects`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import field, frozen
from attrs.validators import ge, gt, le

from forge_core import Problem, StorageComponent
from forge_core.checkpoint.storage import Local
from forge_core.contracts.components import FilePath

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.runtime import Storage
    from forge_core.job import Job

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
"""The extra of this distribution that installs the client of a protocol."""
SECRETS = ("key", "secret", "token", "password", "credential", "connection_string", "account_key", "sas_token")

__all__ = ["Objects"]


@frozen(kw_only=True)
class Objects(StorageComponent):
    """Checkpoints in a bucket, one object for each file. Each rank uploads its own; the manifest, put last, commits.

    Needs no file system that ranks share. Credentials come from where the client looks for them (environment, instance
    role, configuration files): the job is kept with every checkpoint, so it must not hold any.
    """

    url: str
    """`s3://bucket/folder/{job}`, or of another protocol of fsspec (`gs`, `az`, `file`, …). `{job}`, the name of the
    run, must be in it: runs that shared a folder would take each other's checkpoints for their own."""
    cache: FilePath = ""
    """Folder for files on their way to and from the bucket, of the size of one checkpoint's part of this machine; by
    default `checkpoints` in the run folder. `{job}` is the name of the run. Ranks of one machine may share it."""
    parallel: int = field(default=8, validator=[ge(1), le(256)])
    """Requests that a rank makes at a time: files, and parts of a large one."""
    # S3 takes parts of 5 MiB to 5 GiB
    part_mb: int = field(default=64, validator=[ge(5), le(5000)])
    """Files of at least two such parts, in MiB, are uploaded in parts. `parallel` of them are held in memory."""
    retries: int = field(default=5, validator=ge(0))
    """Further attempts after a request has failed, at growing distance; then the save has failed (see `on_failure`)."""
    backoff_s: float = field(default=1.0, validator=gt(0))
    """Seconds before the first further attempt; each later one waits twice as long, at most a minute."""
    timeout_s: float = field(default=60.0, validator=gt(0))
    """Seconds without progress, in addition to its bytes at 256 KiB per second, after which a call has failed."""
    options: dict[str, Any] = field(factory=dict)
    """Further arguments of the protocol's client in fsspec, such as `endpoint_url` of `s3`. No secrets."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks the URL, the client of its protocol, and that no option holds a secret. Does not reach the store."""
        protocol, separator, rest = self.url.partition("://")
        if not separator or not rest.strip("/"):
            yield Problem("url", f"must be like s3://bucket/folder/{{job}}, got {self.url!r}")
            return
        if "{job}" not in rest:
            yield Problem("url", f"must contain {{job}}, the name of the run: {self.url.rstrip('/')}/{{job}}")
        if protocol in ("memory", "http", "https"):
            why = "is the memory of one process" if protocol == "memory" else "cannot be written by fsspec"
            yield Problem("url", f"{protocol}:// {why}; use s3://, gs://, az:// or file://")
            return
        for name in self.options:
            if any(name == secret or name.endswith(f"_{secret}") for secret in SECRETS):
                message = "would be kept in job.toml and in every checkpoint; give it to the client by its environment"
                yield Problem(f"options.{name}", message)
        yield from self._client_problems(protocol)

    def _client_problems(self, protocol: str) -> Iterable[Problem]:
        from fsspec.registry import get_filesystem_class

        try:
            get_filesystem_class(protocol)
        except ValueError:
            yield Problem("url", f"fsspec has no protocol {protocol!r}; use s3://, gs://, az:// or file://")
        except ImportError as error:
            extra = EXTRAS.get(protocol)
            hint = f"pip install 'forge-plugin-checkpoints[{extra}]'" if extra else str(error)
            yield Problem("url", f"the client of {protocol}:// is not installed: {hint}")

    def build(self, context: BuildContext) -> Storage:
        """Opens the bucket of this run; files go through `cache`, by default a folder of the run."""
        from forge_plugin_checkpoints.objects.bucket import Bucket
        from forge_plugin_checkpoints.objects.storage import ObjectStorage

        assert context.folder is not None
        name = context.job.job.name
        bucket = Bucket(
            self.url.replace("{job}", name),
            self.options,
            parallel=self.parallel,
            part=self.part_mb << 20,
            retries=self.retries,
            backoff_s=self.backoff_s,
            timeout_s=self.timeout_s,
        )
        cache = Path(self.cache.replace("{job}", name)) if self.cache else context.folder / Local().folder
        return ObjectStorage(bucket, cache)
