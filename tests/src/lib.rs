//! End-to-end tests, the test bed and the benchmarks.

pub mod bed;
