"""What a server is told. Everything is bounded: a limit that a request exceeds is answered with both numbers."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from pathlib import Path

from pydantic import Field, field_validator

from calib.scheme import Frozen
from toolkit.errors import UsageError
from toolkit.options import LONGEST_S, MOST_QUEUED

ANY_HOST = "*"


class ApiKey(Frozen):
    """A caller: a name that may be logged, and the sha256 of a secret that never is."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    sha256: str

    def opens(self, secret: str) -> bool:
        return hmac.compare_digest(self.sha256, hashlib.sha256(secret.encode()).hexdigest())


class ServeOptions(Frozen):
    """Address, callers and limits of one server."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    model: str = Field(pattern=r"^[^/\s]{1,128}$", description="the model's id in requests; without a slash")
    keys: tuple[ApiKey, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_queue: int = Field(default=256, ge=0, le=MOST_QUEUED, description="prompts waiting beyond a batch; then 429")
    max_prompts: int = Field(default=256, ge=1, description="prompts in one request")
    max_n: int = Field(default=16, ge=1, le=128)
    max_body_bytes: int = Field(default=8 * 1024**2, ge=1024)
    max_json_depth: int = Field(default=64, ge=4, le=200)
    max_stop_chars: int = Field(default=1024, ge=1)
    max_prompt_logprobs: int = Field(default=32_768, ge=1, description="prompt rows with log-probabilities a request")
    body_timeout_s: float = Field(default=30.0, gt=0, description="for a body, and for a head before it; then 408")
    max_connections: int = Field(default=2048, ge=1, description="open beside those of prompts that wait; then 503")
    request_timeout_s: float = Field(default=600.0, gt=0, le=LONGEST_S, description="to the last token; then 504")
    write_timeout_s: float = Field(default=60.0, gt=0, description="for a client to take what it was sent")
    drain_s: float = Field(default=30.0, ge=0, le=LONGEST_S, description="for requests under way after SIGTERM")
    watchdog_s: float = Field(default=60.0, gt=0, le=LONGEST_S, description="without a step, then 503")

    @field_validator("allowed_hosts")
    @classmethod
    def _plain(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(host.lower() for host in hosts)

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def hosts(self) -> frozenset[str]:
        """Names that a request's Host header may carry, without port."""
        return frozenset({"localhost", "127.0.0.1", "[::1]", self.host.lower(), *self.allowed_hosts})

    def key_of(self, secret: str) -> ApiKey | None:
        """The caller whose secret this is. Every key is compared, whatever matches first."""
        found = [key for key in self.keys if key.opens(secret)]
        return found[0] if found else None


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """A file of callers, one ``name:secret`` a line; UsageError for anything else."""
    keys: list[ApiKey] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8", "Write one name:secret a line.") from error
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, colon, secret = line.strip().partition(":")
        if not colon or len(secret) < 16 or any(key.name == name for key in keys):
            raise UsageError(f"{path} line {number} is not a key of its own: name:secret, the secret of 16 or more "
                             "characters", "Write one caller a line.")
        keys.append(ApiKey(name=name, sha256=hashlib.sha256(secret.encode()).hexdigest()))
    if not keys:
        raise UsageError(f"{path} holds no key", "Write one name:secret a line.")
    return tuple(keys)
