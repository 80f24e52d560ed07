//! Builds the command line that the low-level runtime gets for a restore.

use std::ffi::OsString;
use std::path::Path;

use crate::error::Error;
use crate::images;
use crate::request::Request;
use crate::request::argv::{self, Invocation};
use crate::request::context::Context;
use crate::request::lowlevel::RuntimeKind;

/// Adapts the engine's command line to the low-level runtime.
pub(super) fn fit(ctx: &Context, inv: &Invocation) -> Vec<OsString> {
    adapt(ctx.low.kind, &ctx.args, inv)
}

/// Likewise, with the image directory of this operation if it has one.
pub(super) fn with_overlay(
    request: &Request<'_>,
    overlay: Option<&Path>,
) -> Result<Vec<OsString>, Error> {
    let (kind, ctx) = (request.low(), request.ctx);
    let Some(overlay) = overlay else {
        return Ok(adapt(kind, &ctx.args, request.inv));
    };
    let original = std::path::absolute(&request.images)
        .map_err(Error::at(&request.images, "cannot be found"))?;
    // Replaced first, while the indices of flags still match the original line.
    let args = images::with_image_path(&ctx.args, request.inv, overlay, &original);
    match argv::decode(kind, &args) {
        Some(inv) => Ok(adapt(kind, &args, &inv)),
        None => Err(Error::Failed(
            "the command line cannot be understood with another image path".into(),
        )),
    }
}

/// Drops runc's `-no-subreaper`, which containerd's shim passes and crun does not know.
fn adapt(kind: RuntimeKind, args: &[OsString], inv: &Invocation) -> Vec<OsString> {
    let dropped = inv
        .flags
        .place("no-subreaper")
        .filter(|_| kind == RuntimeKind::Crun);
    let kept = args.iter().enumerate().filter(|(i, _)| Some(*i) != dropped);
    kept.map(|(_, a)| a.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::argv::decode;

    #[test]
    fn crun_gets_what_it_takes() {
        let args = "restore --detach -no-subreaper --bundle /b c1".split(' ');
        let args: Vec<OsString> = args.map(OsString::from).collect();
        let inv = decode(RuntimeKind::Crun, &args).unwrap();
        let fit = |kind| adapt(kind, &args, &inv).join(std::ffi::OsStr::new(" "));
        assert_eq!(fit(RuntimeKind::Crun), "restore --detach --bundle /b c1");
        assert_eq!(
            fit(RuntimeKind::Runc),
            "restore --detach -no-subreaper --bundle /b c1"
        );
    }
}
