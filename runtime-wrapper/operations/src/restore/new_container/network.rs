//! Fits the network namespace of a checkpoint to the container that is created from it.
//!
//! podman with a network and Kubernetes make a namespace and name it in the spec; the low-level runtime hands it to
//! CRIU, if the images ask for it. docker and ctr name none, and CRIU makes one. A copy of the one kind into the other
//! gets an image of its namespace that asks, or does not.

use cryopod_archive::criu::network::{self, From, KEY, Network};
use cryopod_gpu_plan::refusal::Refusal;
use cryopod_host::files::Host;
use cryopod_host::spec::Spec;
use serde_json::Value;

use crate::request::lowlevel::RuntimeKind;
use crate::security::host_facts::of_host;

/// CRIU's option for a namespace with nothing in it.
const EMPTY: &str = "empty-ns net";

/// How the checkpoint's network namespace becomes that of the new container.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct NewNetwork {
    /// An image in place of the checkpoint's: its name and content.
    pub image: Option<(String, Vec<u8>)>,
    /// A line of CRIU's configuration.
    pub line: Option<&'static str>,
    /// The loopback device has to be set up.
    pub loopback: bool,
}

impl NewNetwork {
    /// Compares the images with the spec.
    pub fn of(
        found: Option<&Network>,
        host: &Host,
        spec: &Spec,
        low: RuntimeKind,
    ) -> Result<Self, Refusal> {
        // A container on the host's network cannot get another one: `privileges` refuses that.
        let Some(found) = found else {
            return Ok(Self::default());
        };
        let list = spec.json().pointer("/linux/namespaces");
        let list = list.and_then(Value::as_array);
        let entry = list.into_iter().flatten().find(|n| n["type"] == "network");
        let Some(entry) = entry.filter(|n| !of_host(host, n)) else {
            return Err(Refusal::new(
                "the checkpoint has a network of its own, and the new container the host's",
                "give the new container a network of its own, or checkpoint one on the host's",
            ));
        };
        let named = entry["path"].as_str().is_some_and(|p| !p.is_empty());
        let rewritten = |key| Some((found.file.clone(), network::image(key)));
        Ok(match (found.from, named) {
            (From::Outside, true) => Self::default(),
            (From::Outside, false) => Self {
                image: rewritten(None),
                line: Some(EMPTY),
                loopback: true,
            },
            (From::Images | From::Nothing, true) => Self {
                image: rewritten(Some(KEY)),
                ..Self::default()
            },
            // runc has CRIU restore no devices.
            (from, false) => Self {
                loopback: from == From::Nothing || low == RuntimeKind::Runc,
                ..Self::default()
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_archive::criu::ImageError;
    use serde_json::json;

    /// CRIU's images of a first process with network namespace 10 and CRIU in 2.
    fn images(netns: Option<&[u8]>) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, magics: [u32; 2], message: &[u8]| {
            let mut all: Vec<u8> = magics.iter().flat_map(|m| m.to_le_bytes()).collect();
            all.push(u8::try_from(message.len()).unwrap());
            all.extend([0, 0, 0]);
            all.extend(message);
            std::fs::write(dir.path().join(name), all).unwrap();
        };
        write(
            "inventory.img",
            [0x5456_4319, 0x5831_3116],
            b"\x08\x02\x1a\x02\x30\x02",
        );
        write(
            "pstree.img",
            [0x5456_4319, 0x5027_3030],
            b"\x08\x01\x10\x00",
        );
        write("ids-1.img", [0x5456_4319, 0x5443_2030], b"\x30\x0a");
        if let Some(netns) = netns {
            std::fs::write(dir.path().join("netns-10.img"), netns).unwrap();
        }
        dir
    }

    #[test]
    fn all_kinds() {
        let outside = network::image(Some(KEY));
        let settings = network::image(None);
        let own = json!([{"type": "network"}]);
        let path = json!([{"type": "network", "path": "/run/netns/x"}]);
        let ask = |netns: Option<&[u8]>, namespaces: &Value, low| {
            let spec = Spec::from_json(json!({"linux": {"namespaces": namespaces}}));
            let directory = images(netns);
            let open =
                |name: &str| Ok::<_, ImageError>(std::fs::read(directory.path().join(name)).ok());
            let found = network::of_first(open).unwrap();
            NewNetwork::of(found.as_ref(), &Host::at("/nowhere"), &spec, low)
        };
        let fit = |image: Option<Option<&str>>, line, loopback| {
            let name = || "netns-10.img".to_owned();
            let image = image.map(|key| (name(), network::image(key)));
            Ok(NewNetwork {
                image,
                line,
                loopback,
            })
        };
        for (netns, namespaces, low, want) in [
            (
                Some(&outside),
                &path,
                RuntimeKind::Crun,
                fit(None, None, false),
            ),
            (
                Some(&outside),
                &own,
                RuntimeKind::Crun,
                fit(Some(None), Some(EMPTY), true),
            ),
            (
                Some(&settings),
                &path,
                RuntimeKind::Runc,
                fit(Some(Some(KEY)), None, false),
            ),
            (
                None,
                &path,
                RuntimeKind::Runc,
                fit(Some(Some(KEY)), None, false),
            ),
            (
                Some(&settings),
                &own,
                RuntimeKind::Crun,
                fit(None, None, false),
            ),
            (
                Some(&settings),
                &own,
                RuntimeKind::Runc,
                fit(None, None, true),
            ),
            (None, &own, RuntimeKind::Crun, fit(None, None, true)),
        ] {
            let netns = netns.map(Vec::as_slice);
            assert_eq!(ask(netns, namespaces, low), want, "{netns:?} {namespaces}");
        }
        assert!(ask(None, &json!([]), RuntimeKind::Runc).is_err());
    }
}
