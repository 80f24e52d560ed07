"""chart.py: the Kubernetes chart, rendered by Helm's own engine. It gives the objects that tests/tests/scripts/kubernetes/render.py
gives, which stands in for it where only Debian is to be had, and Kubernetes' schemas know all their fields."""

import json
import subprocess
import sys

import helm_python
import kubernetes_validate
import yaml

CHART = "packages/kubernetes/chart"
IMAGE = "registry.example/cryopod:1"
SETTINGS = '[restore]\nallow = [{ from = "docker://registry.example/team", kubernetes = ["default"] }]\n'
VALUES = [
    {"image": IMAGE},
    {"image": IMAGE, "settings": SETTINGS, "warm": ["docker://a@sha256:0", "docker://b@sha256:1"], "registrySecret": "secret", "signingSecret": "cosign",
     "nodeSelector": {"gpu": "yes"}, "imagePullSecrets": [{"name": "secret"}]},
    {"image": IMAGE, "remove": True},
]  # fmt: skip
VERSIONS = ["1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36"]


def objects(texts):
    every = [one for text in texts for one in yaml.safe_load_all(text) if one]
    return sorted(every, key=lambda one: (one["kind"], one["metadata"]["name"]))


report = helm_python.lint(CHART, VALUES[0])
assert not report["errors"], report
for values in VALUES:
    rendered = helm_python.Chart.load(CHART).render(values=values, name="cryopod", namespace="cryopod")
    by_helm = objects(rendered.values())
    words = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    stand_in = [sys.executable, "tests/tests/scripts/kubernetes/render.py", CHART, *words]
    assert by_helm == objects([subprocess.run(stand_in, capture_output=True, text=True, check=True).stdout]), values
    for version in VERSIONS:
        for one in by_helm:
            kubernetes_validate.validate(one, version, strict=True)
    print(f"ok: {len(by_helm)} objects in {len(VERSIONS)} versions: {', '.join(values)}")
