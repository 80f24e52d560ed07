//! Builds the command line that the low-level runtime gets for a restore.

use std::ffi::OsString;
use std::path::Path;

use cryopod_host::cgroups;
use cryopod_host::files::Host;

use crate::argv::{self, Invocation};
use crate::context::Context;
use crate::error::Error;
use crate::images;
use crate::lowlevel::Kind;
use crate::request::{Request, with_flags};

/// Adapts the engine's command line to the low-level runtime.
pub(super) fn fit(ctx: &Context, inv: &Invocation) -> Vec<OsString> {
    adapt(ctx.low.kind, &ctx.args, inv, &Host::system())
}

/// Likewise, with the image directory of this operation if it has one.
pub(super) fn with_overlay(
    request: &Request<'_>,
    overlay: Option<&Path>,
) -> Result<Vec<OsString>, Error> {
    let (kind, ctx, host) = (request.low(), request.ctx, &request.host);
    let Some(overlay) = overlay else {
        return Ok(adapt(kind, &ctx.args, request.inv, host));
    };
    let original = std::path::absolute(&request.images).map_err(Error::io(format!(
        "{}: cannot be found",
        request.images.display()
    )))?;
    // Replaced first, while the indices of flags still match the original line.
    let args = images::with_image_path(&ctx.args, request.inv, overlay, &original);
    match argv::decode(kind, &args) {
        Some(inv) => Ok(adapt(kind, &args, &inv, host)),
        None => Err(Error::Failed(
            "the command line cannot be understood with another image path".into(),
        )),
    }
}

fn adapt(kind: Kind, args: &[OsString], inv: &Invocation, host: &Host) -> Vec<OsString> {
    if kind != Kind::Crun {
        return args.to_vec();
    }
    fit_crun(
        args,
        inv,
        // On a hybrid host a CRIU started by crun fails to restore cgroups. It finds the controllers of version 1 in
        // the image and writes to files that the unified hierarchy of crun lacks (`cpuset.cpus: Permission denied`,
        // CRIU 4.1.1 and 4.2.1). crun sets up the container's cgroup itself.
        cgroups::setup(host) == cgroups::Setup::Hybrid,
    )
}

fn fit_crun(args: &[OsString], inv: &Invocation, ignore_cgroups: bool) -> Vec<OsString> {
    let dropped = inv.flags.place("no-subreaper");
    let mut line: Vec<OsString> = args
        .iter()
        .enumerate()
        .filter(|(i, _)| Some(*i) != dropped)
        .map(|(_, a)| a.clone())
        .collect();
    if ignore_cgroups && inv.flags.value("manage-cgroups-mode").is_none() {
        line = with_flags(&line, inv.verb_at, &["--manage-cgroups-mode", "ignore"]);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::argv::decode;

    #[test]
    fn crun_gets_what_it_takes() {
        let fit = |line: &str, hybrid| {
            let args: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            let inv = decode(Kind::Crun, &args).unwrap();
            fit_crun(&args, &inv, hybrid)
                .iter()
                .map(|a| a.to_str().unwrap().to_owned())
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(
            fit("restore --detach -no-subreaper --bundle /b c1", false),
            "restore --detach --bundle /b c1"
        );
        assert_eq!(fit("--root /r restore c1", false), "--root /r restore c1");
        assert_eq!(
            fit("--root /r restore c1", true),
            "--root /r restore --manage-cgroups-mode ignore c1"
        );
        assert_eq!(
            fit("restore --manage-cgroups-mode soft c1", true),
            "restore --manage-cgroups-mode soft c1"
        );
    }
}
