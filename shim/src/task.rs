//! What is changed in the calls of the task service.

use std::path::Path;

use containerd_shim::api::CreateTaskRequest;
use containerd_shim::protos::protobuf::{Message, MessageField};
use containerd_shim::protos::ttrpc::{Code, Request, Response};

use crate::{options, rpc};

/// What becomes of a request.
#[derive(Debug)]
pub enum Fate {
    /// It goes on as it came.
    Pass,
    /// It goes on like this.
    Changed(Request),
    /// It does not go on; this is the answer.
    Answered(Response),
}

/// Looks at a request of containerd's.
pub fn request(request: &Request, runtime: &Path) -> Fate {
    if !rpc::TASK_SERVICES.contains(&request.service.as_str()) {
        return Fate::Pass;
    }
    match request.method.as_str() {
        "Create" => match create(request, runtime) {
            Ok(changed) => Fate::Changed(changed),
            Err(e) => Fate::Answered(rpc::failure(Code::INVALID_ARGUMENT, e)),
        },
        _ => Fate::Pass,
    }
}

/// The container's OCI runtime is cryopod-runtime.
fn create(request: &Request, runtime: &Path) -> Result<Request, String> {
    let mut create = CreateTaskRequest::parse_from_bytes(&request.payload)
        .map_err(|e| format!("containerd's Create request: {e}"))?;
    let mut options = options::decode(create.options.as_ref()).map_err(|e| e.to_string())?;
    options.binary_name = runtime.to_string_lossy().into_owned();
    if !options.systemd_cgroup {
        options.systemd_cgroup = names_a_slice(Path::new(&create.bundle));
    }
    create.options = MessageField::some(options::encode(&options).map_err(|e| e.to_string())?);
    let mut changed = request.clone();
    changed.payload = create.write_to_bytes().map_err(|e| e.to_string())?;
    Ok(changed)
}

/// Is the container's cgroup written as systemd's (`SLICE:PREFIX:NAME`)? docker tells its cgroup driver only to
/// runtimes that it knows by name.
fn names_a_slice(bundle: &Path) -> bool {
    #[derive(serde::Deserialize)]
    struct Spec {
        linux: Option<Linux>,
    }
    #[derive(serde::Deserialize)]
    struct Linux {
        #[serde(rename = "cgroupsPath")]
        cgroups_path: Option<String>,
    }
    let path = std::fs::read(bundle.join("config.json"))
        .ok()
        .and_then(|bytes| serde_json::from_slice::<Spec>(&bytes).ok())
        .and_then(|spec| spec.linux?.cgroups_path);
    path.is_some_and(|path| {
        let mut parts = path.split(':');
        parts.next().is_some_and(|slice| slice.ends_with(".slice")) && parts.count() == 2
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(method: &str, payload: Vec<u8>) -> Request {
        let mut request = Request::new();
        request.service = "containerd.task.v2.Task".into();
        request.method = method.into();
        request.payload = payload;
        request
    }

    #[test]
    fn create_gets_our_runtime_and_keeps_the_rest() {
        let bundle = tempfile::tempdir().unwrap();
        let mut create = CreateTaskRequest::new();
        create.id = "c1".into();
        create.bundle = bundle.path().to_str().unwrap().into();
        for (cgroup, systemd) in [
            ("/a/b", false),
            ("system.slice:docker:c1", true),
            ("a:b:c", false),
        ] {
            std::fs::write(
                bundle.path().join("config.json"),
                format!(r#"{{"linux":{{"cgroupsPath":"{cgroup}"}}}}"#),
            )
            .unwrap();
            let fate = request(
                &made("Create", create.write_to_bytes().unwrap()),
                Path::new("/r"),
            );
            let Fate::Changed(changed) = fate else {
                panic!("{fate:?}")
            };
            let got = CreateTaskRequest::parse_from_bytes(&changed.payload).unwrap();
            let options = options::decode(got.options.as_ref()).unwrap();
            assert_eq!(
                (
                    got.id.as_str(),
                    options.binary_name.as_str(),
                    options.systemd_cgroup
                ),
                ("c1", "/r", systemd)
            );
        }
    }

    #[test]
    fn everything_else_passes() {
        assert!(matches!(
            request(&made("Start", vec![0xff]), Path::new("/r")),
            Fate::Pass
        ));
        let mut other = made("Create", vec![0xff]);
        other.service = "x.y".into();
        assert!(matches!(request(&other, Path::new("/r")), Fate::Pass));
        assert!(matches!(
            request(&made("Create", vec![0xff]), Path::new("/r")),
            Fate::Answered(_)
        ));
    }
}
