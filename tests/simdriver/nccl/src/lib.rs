//! A simulated NCCL: what a program sees of it, as far as the tests need it.
//!
//! Ranks are processes. Each maps memory of all others, which the simulated driver does not bring back, and has NCCL's
//! socket. Calls are carried out by a thread, in their order, and a group as a whole. A handle that is not NCCL's own is
//! an error and no crash, so that a test sees it. A file `nccl-fail` in `/dev/shm` has every init fail.

mod board;
mod calls;
mod comm;
mod driver;
