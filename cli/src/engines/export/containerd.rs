//! Checkpoints with containerd: `ctr containers checkpoint` takes task, root file system and record at one moment; then
//! exports the result from the content store.

use std::path::Path;

use anyhow::{Context, bail};
use cryopod_archive::source::Source;

use super::{Args, Taken};
use crate::engines::engine::EngineCall;
use crate::terminal::ui::Steps;

pub fn checkpoint(args: &Args, temp: &Path, steps: &mut Steps) -> anyhow::Result<Taken> {
    if !args.leave_running {
        bail!(
            "a containerd checkpoint leaves the container running: say --leave-running, and end it afterwards with `ctr tasks kill`"
        );
    }
    args.without_options_of_podman("ctr")?;
    let ctr = || EngineCall::new("ctr", args.limit()).args(["--namespace", &args.namespace]);
    let image = format!(
        "localhost/cryopod-export/{}:{}",
        args.container.to_lowercase(),
        std::process::id()
    );
    let file = temp.join("checkpoint.tar");
    ctr()
        .args([
            "containers",
            "checkpoint",
            "--rw",
            "--task",
            &args.container,
            &image,
        ])
        .run()?;
    steps.done("ctr containers checkpoint");
    write_image(ctr, &image, &file)?;
    Source::open(&file).with_context(|| {
        format!("the checkpoint is in containerd as {image}; what ctr has made of it is damaged")
    })?;
    let _ = ctr().args(["images", "rm", &image]).run();
    steps.done("ctr images export");
    Ok(Taken {
        source: file,
        extra: Default::default(),
        request: None,
    })
}

/// Writes an image to a file. `ctr` returns a call with its address and namespace.
pub fn write_image(ctr: impl Fn() -> EngineCall, image: &str, file: &Path) -> anyhow::Result<()> {
    let export = |local: bool| {
        ctr()
            .args(["images", "export", "--skip-manifest-json"])
            .flag(local, "--local")
            .args([file])
            .args([image])
            .run()
    };
    // Without this option ctr 2.0 and 2.1 exit when containerd has sent everything, perhaps before it is written: the
    // file is silently truncated. Older versions lack the option, and write the file themselves.
    let written = export(true).or_else(|e| match e.to_string().contains("not defined: -local") {
        true => export(false),
        false => Err(e),
    });
    written.map(drop)
}
