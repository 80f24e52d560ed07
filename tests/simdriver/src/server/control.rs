//! The control socket: a line in, a JSON object out. `cusim-ctl` speaks it.
//!
//! `status`, `set SWITCH`, `clear [NAME]`, `reserve UUID BYTES`.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::faults::Fault;
use super::{Server, control_socket};
use crate::uuid::GpuUuid;

pub fn serve(server: &Arc<Server>, stream: &UnixStream) {
    let mut out = stream;
    for line in BufReader::new(stream).lines().map_while(Result::ok) {
        let reply = command(server, &line).unwrap_or_else(|e| json!({ "error": e.to_string() }));
        if writeln!(out, "{reply}").is_err() {
            break;
        }
    }
}

fn command(server: &Arc<Server>, line: &str) -> Result<Value> {
    let mut words = line.split_whitespace();
    match (words.next(), words.next(), words.next()) {
        (Some("status"), None, None) => Ok(server.world().status()),
        (Some("set"), Some(spec), None) => {
            let fault: Fault = spec.parse()?;
            let mut world = server.world();
            world.faults.set(fault);
            Ok(json!({ "faults": world.faults }))
        }
        (Some("clear"), name, None) => {
            let mut world = server.world();
            world.faults.clear(name);
            Ok(json!({ "faults": world.faults }))
        }
        (Some("reserve"), Some(uuid), Some(bytes)) => {
            let uuid: GpuUuid = uuid.parse()?;
            let bytes: u64 = bytes
                .parse()
                .with_context(|| format!("{bytes:?} is not a number"))?;
            let mut world = server.world();
            if world.gpu(uuid).is_none() {
                bail!("no GPU {uuid}");
            }
            world.reserved.insert(uuid, bytes);
            Ok(world.status())
        }
        _ => bail!("cannot read {line:?}: status | set SWITCH | clear [NAME] | reserve UUID BYTES"),
    }
}

/// Sends one command to the server with this driver socket.
pub fn send(socket: &Path, command: &str) -> Result<Value> {
    let path = control_socket(socket);
    let mut stream =
        UnixStream::connect(&path).with_context(|| format!("no server at {}", path.display()))?;
    writeln!(stream, "{command}")?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    let reply: Value = serde_json::from_str(&line).context("the server's answer is not JSON")?;
    if let Some(e) = reply.get("error").and_then(Value::as_str) {
        bail!("{e}");
    }
    Ok(reply)
}
