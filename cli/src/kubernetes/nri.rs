//! A plugin of NRI, the interface by which containerd and CRI-O let programs adjust containers: hands a pod's annotations on to
//! its containers, without `pod_annotations` in containerd's configuration. containerd starts what is in `/opt/nri/plugins`, by
//! the name `INDEX-NAME`, without arguments and with its end of a socket.
//!
//! Whoever may create a pod writes its annotations, so the plugin hands on no more than containerd does by our
//! [configuration](pod_annotations): it never sets another key, above all none of those by which the runtime knows whose a
//! pod is, and never changes one that the container has. What a value may ask for is for the runtime to decide, as always.
//!
//! The socket carries two streams: frames with a number and a length, and in them ttrpc. One is for the engine's calls, the
//! other for ours.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::FromRawFd;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;

use anyhow::{Context, bail};
use prost::Message;

use crate::setup::containerd::pod_annotations;

/// The variable that names the socket's descriptor.
pub const SOCKET: &str = "NRI_PLUGIN_SOCKET";
const NAME: &str = "NRI_PLUGIN_NAME";
const INDEX: &str = "NRI_PLUGIN_IDX";

/// Numbers of the streams.
const PLUGIN: u32 = 1;
const RUNTIME: u32 = 2;
/// ttrpc's header: length, stream, type, flags.
const HEADER: usize = 10;
const REQUEST: u8 = 1;
const RESPONSE: u8 = 2;
const MAX_MESSAGE: usize = 4 << 20;
/// `CREATE_CONTAINER` among the events for which a plugin asks.
const CREATE_CONTAINER: i32 = 1 << 3;

#[derive(Clone, PartialEq, Message)]
struct NriCall {
    #[prost(string, tag = "1")]
    service: String,
    #[prost(string, tag = "2")]
    method: String,
    #[prost(bytes = "vec", tag = "3")]
    payload: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct NriResponse {
    #[prost(message, optional, tag = "1")]
    status: Option<Status>,
    #[prost(bytes = "vec", tag = "2")]
    payload: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct Status {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
}

#[derive(Clone, PartialEq, Message)]
struct RegisterPluginRequest {
    #[prost(string, tag = "1")]
    plugin_name: String,
    #[prost(string, tag = "2")]
    plugin_idx: String,
}

#[derive(Clone, PartialEq, Message)]
struct ConfigureResponse {
    #[prost(int32, tag = "2")]
    events: i32,
}

/// The request and its response have the other fields that matter nowhere here.
#[derive(Clone, PartialEq, Message)]
struct SynchronizeRequest {
    #[prost(bool, tag = "3")]
    more: bool,
}

#[derive(Clone, PartialEq, Message)]
struct SynchronizeResponse {
    #[prost(bool, tag = "2")]
    more: bool,
}

#[derive(Clone, PartialEq, Message)]
struct CreateContainerRequest {
    #[prost(message, optional, tag = "1")]
    pod: Option<Annotated>,
    #[prost(message, optional, tag = "2")]
    container: Option<Annotated>,
}

/// A pod or a container.
#[derive(Clone, PartialEq, Message)]
struct Annotated {
    #[prost(btree_map = "string, string", tag = "6")]
    annotations: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
struct CreateContainerResponse {
    #[prost(message, optional, tag = "1")]
    adjust: Option<ContainerAdjustment>,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerAdjustment {
    #[prost(btree_map = "string, string", tag = "2")]
    annotations: BTreeMap<String, String>,
}

/// Serves the engine that started this process until it closes the socket.
pub fn run() -> anyhow::Result<ExitCode> {
    let variable = |name| std::env::var(name).with_context(|| format!("{name}: NRI sets it"));
    let descriptor = variable(SOCKET)?.parse().context(SOCKET)?;
    // SAFETY: the engine opened this descriptor for the plugin, and nothing else here uses it.
    let mut socket = unsafe { UnixStream::from_raw_fd(descriptor) };
    let registration = RegisterPluginRequest {
        plugin_name: variable(NAME)?,
        plugin_idx: variable(INDEX)?,
    };
    serve(&mut socket, &registration, &pod_annotations()?)?;
    Ok(ExitCode::SUCCESS)
}

fn serve(
    socket: &mut (impl Read + Write),
    registration: &RegisterPluginRequest,
    passed: &[String],
) -> anyhow::Result<()> {
    let register = NriCall {
        service: "nri.pkg.api.v1alpha1.Runtime".to_owned(),
        method: "RegisterPlugin".to_owned(),
        payload: registration.encode_to_vec(),
    };
    send(socket, RUNTIME, 1, REQUEST, &register.encode_to_vec())?;
    let mut streams: BTreeMap<u32, Vec<u8>> = BTreeMap::new();
    loop {
        let mut head = [0; 8];
        match socket.read_exact(&mut head) {
            Ok(()) => {}
            Err(e) if e.kind() == ErrorKind::UnexpectedEof => return Ok(()),
            Err(e) => return Err(e).context("NRI's socket"),
        }
        let (stream, length) = (number(&head[..4]), number(&head[4..]) as usize);
        if !matches!(stream, PLUGIN | RUNTIME) || length > HEADER + MAX_MESSAGE {
            bail!("NRI's socket: a frame of {length} bytes of stream {stream}");
        }
        let buffer = streams.entry(stream).or_default();
        let start = buffer.len();
        buffer.resize(start + length, 0);
        socket.read_exact(&mut buffer[start..])?;
        // A message may have several frames.
        while buffer.len() >= HEADER {
            let length = number(&buffer[..4]) as usize;
            if length > MAX_MESSAGE {
                bail!("NRI's socket: a message of {length} bytes");
            }
            if buffer.len() < HEADER + length {
                break;
            }
            let message: Vec<u8> = buffer.drain(..HEADER + length).collect();
            let (id, kind, body) = (number(&message[4..8]), message[8], &message[HEADER..]);
            match (stream, kind) {
                (PLUGIN, REQUEST) => {
                    let response = answer(&NriCall::decode(body)?, passed);
                    send(socket, PLUGIN, id, RESPONSE, &response.encode_to_vec())?;
                }
                (RUNTIME, RESPONSE) => {
                    let status = NriResponse::decode(body)?.status.unwrap_or_default();
                    if status.code != 0 {
                        bail!("NRI takes no plugin: {}", status.message);
                    }
                }
                _ => bail!("NRI's socket: a message of type {kind} in stream {stream}"),
            }
        }
    }
}

fn number(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |n, byte| n << 8 | u32::from(*byte))
}

fn send(to: &mut impl Write, stream: u32, id: u32, kind: u8, body: &[u8]) -> anyhow::Result<()> {
    let length = u32::try_from(body.len())?;
    let mut frame = Vec::new();
    for number in [stream, length + HEADER as u32, length, id] {
        frame.extend(number.to_be_bytes());
    }
    frame.extend([kind, 0]);
    frame.extend(body);
    to.write_all(&frame).context("NRI's socket")
}

/// Answers a call. Where a request cannot be read, the error fails the creation of the container.
fn answer(request: &NriCall, passed: &[String]) -> NriResponse {
    let payload = match request.method.as_str() {
        "Configure" => Ok(ConfigureResponse {
            events: CREATE_CONTAINER,
        }
        .encode_to_vec()),
        // The engine tells of many containers in several calls, and asks whether the plugin knows that.
        "Synchronize" => SynchronizeRequest::decode(request.payload.as_slice())
            .map(|asked| SynchronizeResponse { more: asked.more }.encode_to_vec()),
        "CreateContainer" => {
            CreateContainerRequest::decode(request.payload.as_slice()).map(|created| {
                let adjust = ContainerAdjustment {
                    annotations: handed_on(created, passed),
                };
                let adjust = Some(adjust).filter(|adjust| !adjust.annotations.is_empty());
                CreateContainerResponse { adjust }.encode_to_vec()
            })
        }
        // All others are events with an empty answer.
        _ => Ok(Vec::new()),
    };
    payload.map_or_else(
        |error| NriResponse {
            status: Some(Status {
                code: 3, // INVALID_ARGUMENT
                message: format!("cryopod: {}: {error}", request.method),
            }),
            payload: Vec::new(),
        },
        |payload| NriResponse {
            status: None,
            payload,
        },
    )
}

/// Returns the pod's annotations that its new container gets. `passed`: names, or beginnings of names before a `*`.
fn handed_on(created: CreateContainerRequest, passed: &[String]) -> BTreeMap<String, String> {
    let own = created.container.unwrap_or_default().annotations;
    let may_pass = |key: &str| {
        passed.iter().any(|name| match name.strip_suffix('*') {
            Some(beginning) => key.starts_with(beginning),
            None => key == name,
        })
    };
    let mut all = created.pod.unwrap_or_default().annotations;
    all.retain(|key, _| may_pass(key) && !own.contains_key(key));
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    fn annotated(pairs: &[(&str, &str)]) -> Option<Annotated> {
        let annotations = pairs.iter().map(|(k, v)| ((*k).into(), (*v).into()));
        Some(Annotated {
            annotations: annotations.collect(),
        })
    }

    fn call(method: &str, message: &impl Message) -> Vec<u8> {
        NriCall {
            service: String::new(),
            method: method.to_owned(),
            payload: message.encode_to_vec(),
        }
        .encode_to_vec()
    }

    #[test]
    fn a_pod_passes_no_more_than_by_the_configuration() {
        let passed = pod_annotations().unwrap();
        let pod = [
            ("dev.cryopod.restore", "docker://r/a:1"),
            ("dev.cryopod.restore.job", "docker://r/b:1"),
            ("dev.cryopod.preload", "on"),
            ("dev.cryopod.store", "on"),
            // They name paths of the host, its GPUs or programs, or say whose the pod is.
            ("dev.cryopod.gpu.map", "a=b"),
            ("dev.cryopod.parent", "/"),
            ("dev.cryopod.exec.before-checkpoint", "sh"),
            ("dev.cryopod.restored", "x"),
            ("dev.cryopod.criu.network-lock", "skip"),
            ("org.criu.config", "/x"),
            ("io.kubernetes.cri.sandbox-namespace", "theirs"),
            ("io.container.manager", "cri-o"),
        ];
        let created = CreateContainerRequest {
            pod: annotated(&pod),
            container: annotated(&[("dev.cryopod.store", "off")]),
        };
        let got = handed_on(created, &passed);
        assert_eq!(got, annotated(&pod[..3]).unwrap().annotations);
    }

    /// The engine's side, in memory: what it says is read, what the plugin says is kept.
    struct Engine(Cursor<Vec<u8>>, Vec<u8>);

    impl Read for Engine {
        fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
            self.0.read(to)
        }
    }

    impl Write for Engine {
        fn write(&mut self, from: &[u8]) -> std::io::Result<usize> {
            self.1.write(from)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn served(said: Vec<u8>) -> (anyhow::Result<()>, Vec<u8>) {
        let mut engine = Engine(Cursor::new(said), Vec::new());
        let done = serve(
            &mut engine,
            &RegisterPluginRequest::default(),
            &["a".to_owned()],
        );
        (done, engine.1)
    }

    #[test]
    fn calls_come_whole_in_parts_and_damaged() {
        let created = CreateContainerRequest {
            pod: annotated(&[("a", "1"), ("b", "2")]),
            container: None,
        };
        let mut whole = Vec::new();
        send(
            &mut whole,
            PLUGIN,
            7,
            REQUEST,
            &call("CreateContainer", &created),
        )
        .unwrap();
        let (done, said) = served(whole.clone());
        done.unwrap();
        let adjust = CreateContainerResponse {
            adjust: Some(ContainerAdjustment {
                annotations: annotated(&[("a", "1")]).unwrap().annotations,
            }),
        };
        let response = NriResponse {
            status: None,
            payload: adjust.encode_to_vec(),
        };
        let mut want = Vec::new();
        send(&mut want, PLUGIN, 7, RESPONSE, &response.encode_to_vec()).unwrap();
        assert!(said.ends_with(&want), "{said:?}");

        let mut parts = Vec::new();
        for part in whole[8..].chunks(3) {
            parts.extend(PLUGIN.to_be_bytes());
            parts.extend((part.len() as u32).to_be_bytes());
            parts.extend(part);
        }
        assert_eq!(served(parts).1, said);

        for bad in [[0, 0, 0, 3, 0, 0, 0, 0], [0, 0, 0, 1, 255, 0, 0, 0]] {
            assert!(served(bad.to_vec()).0.is_err());
        }
        let mut refused = Vec::new();
        let status = Some(Status {
            code: 2,
            message: "no".to_owned(),
        });
        let response = NriResponse {
            status,
            payload: Vec::new(),
        };
        send(
            &mut refused,
            RUNTIME,
            1,
            RESPONSE,
            &response.encode_to_vec(),
        )
        .unwrap();
        assert!(served(refused).0.unwrap_err().to_string().ends_with(": no"));
        // An annotation that is no text.
        let bad = [0x0a, 5, 0x32, 3, 0x0a, 1, 0xff];
        let request = NriCall {
            method: "CreateContainer".to_owned(),
            payload: bad.to_vec(),
            ..NriCall::default()
        };
        assert_ne!(answer(&request, &[]).status.unwrap_or_default().code, 0);
    }
}
