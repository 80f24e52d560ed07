"""kubelet.py PORT: stands in for an API server and the kubelet of one node. kubectl gives it pods, and it runs them by
containerd's CRI: as much of both as the chart and `kubectl cryopod` ask for. A pod is on the host's network. A job is
a process of this host, whose own root is at /host."""

import http.server
import json
import os
import pathlib
import subprocess
import sys
import time
import urllib.parse

NODE = "node1"
SECRETS = pathlib.Path("/tmp/secrets")
CHECKPOINTS = pathlib.Path("/var/lib/kubelet/checkpoints")
KINDS = {
    "pods": ("v1", "Pod", True),
    "configmaps": ("v1", "ConfigMap", True),
    "serviceaccounts": ("v1", "ServiceAccount", True),
    "runtimeclasses": ("node.k8s.io/v1", "RuntimeClass", False),
    "daemonsets": ("apps/v1", "DaemonSet", True),
    "deployments": ("apps/v1", "Deployment", True),
    "jobs": ("batch/v1", "Job", True),
    "clusterroles": ("rbac.authorization.k8s.io/v1", "ClusterRole", False),
    "clusterrolebindings": ("rbac.authorization.k8s.io/v1", "ClusterRoleBinding", False),
}
GROUPS = sorted({version for version, _, _ in KINDS.values() if version != "v1"})
objects = {kind: {} for kind in KINDS}
containers = {}  # pod: its sandbox, its containers by name


def cri(method, fields):
    grpc = "/src/tests/testbed/grpc.sh"
    command = [grpc, "/run/containerd/containerd.sock", f"runtime.v1.RuntimeService/{method}", json.dumps(fields)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip())
    return done.stdout.strip()


def log_file(pod, container):
    return pathlib.Path(f"/var/log/pods/default_{pod}/{container}.log")


def run(pod):
    name = pod["metadata"]["name"]
    handler = objects["runtimeclasses"][pod["spec"]["runtimeClassName"]]["handler"]
    annotations = pod["metadata"].get("annotations", {}).items()
    host_network = [8, [[2, [[1, [[1, 2], [2, 1], [3, 1]]]]]]]
    directory = log_file(name, "").parent
    directory.mkdir(parents=True)
    sandbox = [[1, [[1, name], [2, pod["metadata"]["uid"]], [3, "default"]]], [3, str(directory)]]
    sandbox += [[7, [[1, key], [2, value]]] for key, value in annotations] + [host_network]
    made = cri("RunPodSandbox", [[1, sandbox], [2, handler]])
    containers[name] = (made, {})
    for container in pod["spec"]["containers"]:
        config = [[1, [[1, container["name"]]]], [2, [[1, container["image"]]]]]
        config += [[3, word] for word in container.get("command", [])] + [[4, word] for word in container.get("args", [])]
        config += [[11, f"{container['name']}.log"]]
        one = cri("CreateContainer", [[1, made], [2, config], [3, sandbox]])
        cri("StartContainer", [[1, one]])
        containers[name][1][container["name"]] = one
    pod["spec"]["nodeName"] = NODE
    pod["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}


def end(name):
    sandbox, _ = containers.pop(name)
    cri("StopPodSandbox", [[1, sandbox]])
    cri("RemovePodSandbox", [[1, sandbox]])


def checkpoint(pod, container):
    CHECKPOINTS.mkdir(mode=0o700, parents=True, exist_ok=True)
    archive = CHECKPOINTS / f"checkpoint-{pod}_default-{container}-{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}.tar"
    cri("CheckpointContainer", [[1, containers[pod][1][container]], [2, str(archive)]])
    return {"items": [str(archive)]}


def run_job(job):
    name, template = job["metadata"]["name"], job["spec"]["template"]
    container = template["spec"]["containers"][0]
    secrets = {one["name"]: one["secret"]["secretName"] for one in template["spec"]["volumes"] if "secret" in one}
    for mount in container["volumeMounts"]:
        if mount["name"] in secrets:
            place = pathlib.Path(mount["mountPath"])
            place.unlink(missing_ok=True)
            place.symlink_to(SECRETS / secrets[mount["name"]])
    env = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in container.get("env", [])}
    env = {name: (SECRETS / ref["name"] / ref["key"]).read_text() for name, ref in env.items()}
    done = subprocess.run(container["command"], capture_output=True, text=True, env={**os.environ, **env})
    job["spec"]["selector"] = {"matchLabels": {"job-name": name}}
    job["status"] = {"conditions": [{"type": "Failed" if done.returncode else "Complete", "status": "True"}]}
    metadata = {"name": f"{name}-0", "namespace": job["metadata"]["namespace"], "labels": {"job-name": name}}
    log_file(f"{name}-0", "").parent.mkdir(parents=True)
    lines = (done.stdout + done.stderr).splitlines()
    log_file(f"{name}-0", "push").write_text("".join(f"0 stdout F {line}\n" for line in lines))
    objects["pods"][f"{name}-0"] = {"kind": "Pod", "apiVersion": "v1", "metadata": metadata, "spec": template["spec"], "status": {"phase": "Succeeded"}}


def merge(old, patch):
    for key, value in patch.items():
        if value is None:
            old.pop(key, None)
        elif isinstance(value, dict):
            old[key] = merge(old.get(key) or {}, value)
        else:
            old[key] = value
    return old


def has(labels, selector):
    return all(labels.get(key) == value for key, value in (one.split("=", 1) for one in selector.split(",")))


def logs(pod, container, tail):
    lines = log_file(pod, container).read_text().splitlines()
    lines = [line.split(" ", 3)[3] for line in lines]  # TIME STREAM F TEXT
    return "".join(line + "\n" for line in (lines[-int(tail) :] if tail else lines))


def resources(version):
    verbs = ["create", "delete", "get", "list", "patch", "watch"]
    found = [
        {"name": name, "singularName": kind.lower(), "kind": kind, "namespaced": namespaced, "verbs": verbs}
        for name, (of, kind, namespaced) in KINDS.items()
        if of == version
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": found}


def schema(version):  # says that the server looks at unknown fields by itself
    group, _, number = version.rpartition("/")
    paths = {}
    for name, (of, kind, _) in KINDS.items():
        if of == version:
            kinds = {"group": group, "version": number, "kind": kind}
            parameters = [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}]
            paths[f"/{name}/{{name}}"] = {"patch": {"parameters": parameters, "x-kubernetes-group-version-kind": kinds, "responses": {}}}
    return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "1"}, "paths": paths}


DISCOVERY = {
    "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [{"name": of.split("/")[0], "versions": [{"groupVersion": of, "version": "v1"}],
                    "preferredVersion": {"groupVersion": of, "version": "v1"}} for of in GROUPS],
    },
    "/api/v1": resources("v1"),
    **{f"/apis/{of}": resources(of) for of in GROUPS},
    "/openapi/v3": {"paths": {at: {"serverRelativeURL": f"/openapi/v3/{at}"} for at in ["api/v1"] + [f"apis/{of}" for of in GROUPS]}},
    "/openapi/v3/api/v1": schema("v1"),
    **{f"/openapi/v3/apis/{of}": schema(of) for of in GROUPS},
}  # fmt: skip


class Server(http.server.BaseHTTPRequestHandler):
    def answer(self, code, body):
        text = isinstance(body, str)
        data = body.encode() if text else json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain" if text else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def status(self, code, reason, message):
        self.answer(code, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": message})

    def serve(self):
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        parts = url.path.strip("/").split("/")
        kind = next((k for k in KINDS if k in parts), None)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if url.path in DISCOVERY:
            self.answer(200, DISCOVERY[url.path])
        elif self.command == "POST" and parts[:5] == ["api", "v1", "nodes", NODE, "proxy"]:
            _, namespace, pod, container = parts[5:]
            assert namespace == "default"
            self.answer(200, checkpoint(pod, container))
        elif kind is None or query.get("watch"):
            self.status(404, "NotFound", f"{self.path}: there is no such thing in this stand-in")
        else:
            self.serve_object(kind, parts[parts.index(kind) + 1 :], query, body)

    def serve_object(self, kind, name, query, body):
        known = objects[kind]
        version, word, _ = KINDS[kind]
        if self.command == "POST" and not name:
            one = json.loads(body)
            one["metadata"].setdefault("name", one["metadata"].get("generateName", "") + str(time.time_ns()))
            one["metadata"] |= {"uid": f"uid-{time.time_ns()}", "resourceVersion": "1"}
            if kind == "pods":
                run(one)
            if kind == "jobs":
                run_job(one)
            known[one["metadata"]["name"]] = one
            self.answer(201, one)
        elif not name:
            wanted = query.get("fieldSelector", "").removeprefix("metadata.name=")
            items = [one for key, one in known.items() if wanted in ("", key)]
            if "labelSelector" in query:
                items = [one for one in items if has(one["metadata"].get("labels", {}), query["labelSelector"])]
            self.answer(200, {"kind": f"{word}List", "apiVersion": version, "metadata": {"resourceVersion": "1"}, "items": items})
        elif name[0] not in known:
            self.status(404, "NotFound", f'{kind} "{name[0]}" not found')
        elif name[1:] == ["log"]:
            pod = known[name[0]]
            container = query.get("container", pod["spec"]["containers"][0]["name"])
            self.answer(200, logs(name[0], container, query.get("tailLines")))
        elif self.command == "PATCH":
            self.answer(200, merge(known[name[0]], json.loads(body)))
        elif self.command == "DELETE":
            if kind == "pods":
                end(name[0])
            self.answer(200, known.pop(name[0]))
        else:
            self.answer(200, known[name[0]])

    def do_GET(self):
        try:
            self.serve()
        except Exception as error:  # kubectl shows it
            self.status(500, "InternalError", f"{type(error).__name__}: {error}")

    do_POST = do_DELETE = do_PATCH = do_GET

    def log_message(self, line, *arguments):
        print(line % arguments, file=sys.stderr, flush=True)


http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Server).serve_forever()
