"""HTTPS from the cluster file to the official client, and a certificate that is renewed under a running stream."""

import ssl
from pathlib import Path
from typing import Any

import httpx
import openai
from tests.e2e.cluster import TEST_HOME, Cluster, launch, wait_for, write_file
from tests.net.certificates import CA, der, issue, write

MODEL = {"name": "chat", "task": "chat", "source": "synthetic", "engine": {"name": "synthetic", "step_ms": 20}}


def ask(client: openai.OpenAI, tokens: int) -> Any:
    """A stream of so many tokens."""
    return client.chat.completions.create(
        model="chat",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=tokens,
        stream=True,
        extra_body={"ignore_eos": True},
    )


def shown(cluster: Cluster) -> bytes:
    """The certificate that a new connection is shown, DER."""
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("127.0.0.1", cluster.gateway_port)))


def test_https_stream_survives_certificate_renewal(tmp_path: Path) -> None:
    ca, old, new = tmp_path / "ca.pem", issue(), issue()
    CA.cert_pem.write_to_path(ca)
    path, spec = tmp_path / "forebay.yaml", write(tmp_path, old)
    ports = write_file(path, "tls", [MODEL], processes=2, tls={"certificate": spec.certificate, "key": spec.key})
    cluster = launch(path, "tls", ports, TEST_HOME)
    base = f"https://127.0.0.1:{cluster.gateway_port}"
    verify = ssl.create_default_context(cafile=ca)
    try:
        with httpx.Client(base_url=base, verify=verify, trust_env=False) as web:
            wait_for(f"ready; it said:\n{cluster.said()}", lambda: web.get("/readyz").status_code == 200, 60)
            wait_for("the first curl", lambda: f"curl {base}/v1/chat/completions" in cluster.said())
            with openai.OpenAI(base_url=f"{base}/v1", api_key="none", http_client=web, max_retries=0) as client:
                stream = iter(ask(client, 300))
                pieces = [next(stream)]
                write(tmp_path, new)
                for _ in range(4):  # connections come to either of the two processes
                    wait_for("the new certificate", lambda: shown(cluster) == der(new))
                pieces += stream
                assert pieces[-1].choices[0].finish_reason == "length"
                assert list(ask(client, 1))
        assert cluster.status()["gateways"][0]["url"].startswith("https://")
        assert cluster.stop() == 0
    finally:
        cluster.kill()
