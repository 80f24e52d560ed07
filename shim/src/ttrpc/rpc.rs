//! Makes one ttrpc call at a time, over a connection of its own.

use std::io;
use std::time::Duration;

use containerd_shim::protos::protobuf::Message;
use containerd_shim::protos::ttrpc::proto::MessageHeader;
use containerd_shim::protos::ttrpc::{Code, Request, Response, Status};

use crate::ttrpc::address::Address;
use crate::ttrpc::frame::Frame;

/// The names of containerd's task service, in both versions.
pub const TASK_SERVICES: [&str; 2] = ["containerd.task.v3.Task", "containerd.task.v2.Task"];

/// The key of containerd's namespace in requests.
const NAMESPACE: &str = "containerd-namespace-ttrpc";

/// Makes a call and waits for the response, at most for `limit`.
///
/// # Errors
/// The peer is gone or does not respond in time. An error from the peer is in the response's status.
pub fn call(to: &Address, request: &Request, limit: Option<Duration>) -> io::Result<Response> {
    let mut stream = to.connect()?;
    stream.set_read_timeout(limit)?;
    stream.set_write_timeout(limit)?;
    let body = request.write_to_bytes().map_err(io::Error::other)?;
    let frame = Frame {
        header: MessageHeader::new_request(1, 0),
        body,
    };
    frame.write(&mut stream)?;
    let answer =
        Frame::read(&mut stream)?.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
    Response::parse_from_bytes(&answer.body).map_err(io::Error::other)
}

/// Calls a method of the task service in the version that the peer supports.
pub fn task_call(
    to: &Address,
    namespace: &str,
    method: &str,
    message: &impl Message,
    limit: Duration,
) -> io::Result<Response> {
    let payload = message.write_to_bytes().map_err(io::Error::other)?;
    let mut last = None;
    for service in TASK_SERVICES {
        let mut request = Request::new();
        request.service = service.into();
        request.method = method.into();
        request.payload = payload.clone();
        request.timeout_nano = i64::try_from(limit.as_nanos()).unwrap_or(i64::MAX);
        request.metadata.push(pair(NAMESPACE, namespace));
        let response = call(to, &request, Some(limit))?;
        if response.status().code() != Code::UNIMPLEMENTED {
            return Ok(response);
        }
        last = Some(response);
    }
    last.ok_or_else(|| io::Error::other("no version of the task service"))
}

fn pair(key: &str, value: &str) -> containerd_shim::protos::ttrpc::proto::KeyValue {
    let mut pair = containerd_shim::protos::ttrpc::proto::KeyValue::new();
    pair.key = key.into();
    pair.value = value.into();
    pair
}

/// Returns a response with an error and no payload.
pub fn failure(code: Code, message: impl Into<String>) -> Response {
    let mut status = Status::new();
    status.set_code(code);
    status.set_message(message.into());
    let mut response = Response::new();
    response.set_status(status);
    response
}

/// Returns true if the response has no error.
pub fn succeeded(response: &Response) -> bool {
    response.status().code() == Code::OK
}
