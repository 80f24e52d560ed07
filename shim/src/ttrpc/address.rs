//! Parses socket addresses as shims write them: `unix:///run/containerd/s/HASH`, or a bare path. Since containerd 2.0 the
//! address is in a JSON object, since 2.3 in a protobuf message.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::{fs, io};

use containerd_shim::protos::protobuf::UnknownFields;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::bootstrap::{fields, last_bytes};

#[derive(Debug, Clone, PartialEq)]
pub struct Bootstrap {
    /// The address where the shim listens.
    pub address: String,
    /// The rest of the answer, unchanged.
    form: Form,
}

#[derive(Debug, Clone, PartialEq)]
enum Form {
    /// containerd 1.7's shim: a bare address.
    Text,
    /// 2.0's to 2.2's: a JSON object.
    Object(serde_json::Map<String, serde_json::Value>),
    /// 2.3's and newer: a `BootstrapResult`.
    Message(UnknownFields),
}

/// `BootstrapResult.address`.
const RESULT_ADDRESS: u32 = 2;

impl Bootstrap {
    /// Parses an answer; `None` if it has none of the forms.
    pub fn read(answer: &[u8]) -> Option<Self> {
        // The tags of a `BootstrapResult` are control characters, so it is neither a JSON object nor an address.
        let text = std::str::from_utf8(answer).ok();
        text.and_then(Self::from_text)
            .or_else(|| Self::from_message(answer))
    }

    fn from_text(text: &str) -> Option<Self> {
        let text = text.trim();
        if let Ok(serde_json::Value::Object(object)) = serde_json::from_str(text) {
            let address = object.get("address")?.as_str()?.to_owned();
            let form = Form::Object(object);
            return Some(Self { address, form });
        }
        let plain =
            !text.is_empty() && !text.contains(|c: char| c.is_whitespace() || c.is_control());
        plain.then(|| Self {
            address: text.to_owned(),
            form: Form::Text,
        })
    }

    fn from_message(bytes: &[u8]) -> Option<Self> {
        let message = fields(bytes)?;
        let address = String::from_utf8(last_bytes(&message, RESULT_ADDRESS)?.to_vec()).ok()?;
        let form = Form::Message(message);
        (!address.is_empty()).then_some(Self { address, form })
    }

    /// Returns the same answer with another address, in the same form.
    pub fn with_address(&self, address: &str) -> Vec<u8> {
        match &self.form {
            Form::Text => address.into(),
            Form::Object(object) => {
                let mut object = object.clone();
                object.insert("address".into(), address.into());
                serde_json::Value::Object(object).to_string().into_bytes()
            }
            Form::Message(message) => {
                let mut message = message.clone();
                message.remove(RESULT_ADDRESS);
                message.add_length_delimited(RESULT_ADDRESS, address.into());
                message.write_to_bytes()
            }
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Address(pub String);

impl Address {
    /// Returns our socket for a stock shim's socket: beside it, with a name derived from it. So all containers of one
    /// stock shim (a pod) share one of ours.
    pub fn for_upstream(upstream: &Self) -> Self {
        let mut name = String::with_capacity(64);
        for byte in Sha256::digest(format!("cryopod {}", upstream.0)) {
            name.push_str(&format!("{byte:02x}"));
        }
        Self(format!(
            "unix://{}",
            upstream.path().with_file_name(name).display()
        ))
    }

    /// The socket's file.
    pub fn path(&self) -> &Path {
        Path::new(self.0.strip_prefix("unix://").unwrap_or(&self.0))
    }

    /// Connects to the socket.
    pub fn connect(&self) -> io::Result<UnixStream> {
        UnixStream::connect(self.path())
    }

    /// Listens, with the socket mode of containerd's shims. Replaces a socket on which nobody listens any more. Returns
    /// `None` if somebody does.
    pub fn listen(&self) -> io::Result<Option<UnixListener>> {
        use std::os::unix::fs::PermissionsExt;
        let path = self.path();
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory)?;
        }
        for again in [true, false] {
            match UnixListener::bind(path) {
                Ok(listener) => {
                    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
                    return Ok(Some(listener));
                }
                Err(e) if e.kind() != io::ErrorKind::AddrInUse => return Err(e),
                Err(e) => {
                    if self.connect().is_ok() {
                        return Ok(None);
                    }
                    if !again {
                        return Err(e);
                    }
                    self.remove();
                }
            }
        }
        Ok(None)
    }

    /// Removes the socket's file.
    pub fn remove(&self) {
        let _ = fs::remove_file(self.path());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_of_the_answer() {
        let read = |text: &str| Bootstrap::read(text.as_bytes());
        let bare = read("unix:///run/containerd/s/ab\n").unwrap();
        assert_eq!(bare.address, "unix:///run/containerd/s/ab");
        assert_eq!(bare.with_address("unix:///x"), b"unix:///x");
        let json = read(r#"{"version":3,"address":"unix:///a","protocol":"ttrpc"}"#).unwrap();
        assert_eq!(json.address, "unix:///a");
        assert_eq!(
            json.with_address("unix:///b"),
            br#"{"version":3,"address":"unix:///b","protocol":"ttrpc"}"#
        );
        // Version 3, address "unix:///a", protocol "ttrpc", and field 6, which this version does not know.
        let message = "\x08\x03\x12\x09unix:///a\x1a\x05ttrpc\x32\x02ab";
        let message = read(message).unwrap();
        assert_eq!(message.address, "unix:///a");
        let changed = Bootstrap::read(&message.with_address("unix:///b")).unwrap();
        assert_eq!(changed.address, "unix:///b");
        assert_eq!(
            Bootstrap::read(&changed.with_address("unix:///a")),
            Some(message)
        );
        for bad in [
            "",
            "two words",
            "{}",
            r#"{"address":1}"#,
            "\x08\x03",
            "\x08\x03\x12\x00",
            "\x12\x09x",
        ] {
            assert_eq!(read(bad), None, "{bad}");
        }
    }

    #[test]
    fn one_of_ours_for_one_of_theirs() {
        let of = |a: &str| Address::for_upstream(&Address(a.into()));
        assert_eq!(
            of("unix:///run/containerd/s/a"),
            of("unix:///run/containerd/s/a")
        );
        assert_ne!(
            of("unix:///run/containerd/s/a"),
            of("unix:///run/containerd/s/b")
        );
        assert!(of("unix:///r/s/a").0.starts_with("unix:///r/s/"));
    }

    #[test]
    fn a_dead_socket_is_taken_over_and_a_live_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let address = Address(format!("unix://{}/sub/s", dir.path().display()));
        let first = address.listen().unwrap().unwrap();
        assert!(address.listen().unwrap().is_none());
        drop(first);
        assert!(address.listen().unwrap().is_some());
        address.remove();
        assert!(address.connect().is_err());
    }
}
