"""An S3 server of moto's, with a proxy in front of it, and runs that save through it."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from proxy import Proxy


@pytest.fixture(scope="session")
def moto_port():
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture
def proxy(moto_port):
    with Proxy(moto_port) as proxy:
        yield proxy


class Store:
    """A bucket, seen past the proxy."""

    def __init__(self, port, proxy):
        self.name = f"bucket-{uuid.uuid4().hex[:12]}"
        self.endpoint = f"http://127.0.0.1:{proxy.port}"
        self.client = pytest.importorskip("boto3").client("s3", endpoint_url=f"http://127.0.0.1:{port}")
        self.client.create_bucket(Bucket=self.name)

    def contents(self):
        return sorted(entry["Key"] for entry in self.client.list_objects_v2(Bucket=self.name).get("Contents", ()))

    def steps(self):
        return sorted(
            {int(key.split("step-")[1].split("/")[0]) for key in self.contents() if key.endswith("manifest.json")}
        )

    def uploads(self):
        return [entry["Key"] for entry in self.client.list_multipart_uploads(Bucket=self.name).get("Uploads", ())]

    def put(self, key, data):
        self.client.put_object(Bucket=self.name, Key=key, Body=data)

    def get(self, key):
        return self.client.get_object(Bucket=self.name, Key=key)["Body"].read()


@pytest.fixture
def store(moto_port, proxy, monkeypatch):
    for name, value in {"ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test", "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    return Store(moto_port, proxy)
