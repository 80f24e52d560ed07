//! Changes the bundle for a restore: its spec, its files and its mount points.

use cryopod_host::cgroups::Cgroups;
use cryopod_host::spec::Spec;

use super::prepare::RestorePreparation;
use crate::bundle::render::OnlyRender;
use crate::bundle::{BundleUndo, Devices, DroppedHooks, Edit, edit};
use crate::error::Error;
use crate::preflight::surroundings::MountPoints;
use crate::request::Request;
use crate::restore::new_container::hooks;
use crate::rootfs;
use crate::run::abandoned::RestoreNote;
use crate::run::operation::Operation;

/// The changes. Dropped without [`BundleChanges::keep`], spec and mount points are as they were.
pub(super) struct BundleChanges {
    edited: BundleUndo,
    mount_points: MountPoints,
    of_new: Option<MountPoints>,
    /// The container's cgroups, as far as they were vacant before.
    pub cgroups: Cgroups,
    pub restoring: RestoreNote,
}

/// Makes them. `on_disk`: what `config.json` holds now. `edits`: those that the plan knows already.
///
/// # Errors
/// Nothing is changed.
pub(super) fn change(
    request: &Request<'_>,
    on_disk: &Spec,
    edits: Vec<Box<dyn Edit>>,
    prepared: &RestorePreparation,
    op: &Operation,
) -> Result<BundleChanges, Error> {
    let (host, spec, bundle) = (&request.host, &request.spec, &request.bundle);
    let mut edits: Vec<Box<dyn Edit + '_>> = edits;
    edits.extend(planned(request, prepared));
    let edited = edit(host, bundle, on_disk, &edits, Some(op.dir()))?;
    let path = spec.cgroup(request.id());
    let cgroups = path
        .map(|path| Cgroups::vacant(host, path))
        .unwrap_or_default();
    let restoring = RestoreNote::of(request, cgroups.clone());
    if request.flag("detach") {
        restoring.note(op.dir())?;
    }
    rootfs::apply(request.config(), &request.images, bundle)?;
    if let Some(shm) = rootfs::own_shm(&request.mounts, bundle) {
        rootfs::apply_shm(request.config(), spec, &request.images, &shm)?;
    }
    let provision = &prepared.provision;
    let mount_points = provision.mount_points(bundle, spec, &request.mounts)?;
    let of_new = prepared.new_mounts.as_ref();
    let of_new = of_new.map(|m| m.provide(request, op)).transpose()?;
    Ok(BundleChanges {
        edited,
        mount_points,
        of_new,
        cgroups,
        restoring,
    })
}

impl BundleChanges {
    /// Keeps them, after a successful restore.
    pub fn keep(self) {
        self.edited.keep();
        self.mount_points.keep();
        if let Some(points) = self.of_new {
            points.keep();
        }
    }
}

fn planned<'a>(
    request: &'a Request<'_>,
    prepared: &'a RestorePreparation,
) -> Vec<Box<dyn Edit + 'a>> {
    let mut edits: Vec<Box<dyn Edit + 'a>> = vec![
        Box::new(Devices {
            remap: &prepared.chosen.remap,
        }),
        Box::new(DroppedHooks {
            drop: &request.config().hooks.drop,
        }),
        Box::new(prepared.provision.sources.clone()),
    ];
    if prepared.new_mounts.is_some() {
        edits.push(Box::new(hooks::HooksRemoval));
    }
    if let Some(pairs) = &prepared.amd_pairs {
        let visible = pairs.iter().map(|p| p.target.render_minor()).collect();
        edits.push(Box::new(OnlyRender { visible }));
    }
    edits
}
