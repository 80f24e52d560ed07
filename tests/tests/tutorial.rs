//! The commands of docs/tutorial.md.

crate::scenarios! {
    engines: V1 [] "shim/lib.sh" + "setup/lib.sh" + "tutorial/lib.sh" + "tutorial/engines.sh";
}

crate::scenarios! {
    with crate::containers::run_torch;
    gpu: V2 [] "tutorial/lib.sh" + "tutorial/gpu.sh";
}

crate::scenarios! {
    with crate::run_cri;
    /// The chart, and `kubectl cryopod`.
    cluster: V1 [] "archive/lib.sh" + "shim/lib.sh" + "setup/lib.sh" + "kubernetes/cluster.sh";
}
