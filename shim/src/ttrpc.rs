//! The part of ttrpc that a proxy needs: addresses, frames, calls, and the task service's responses.

pub mod address;
pub mod frame;
pub mod responses;
pub mod rpc;
