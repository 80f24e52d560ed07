//! Defines the file names inside a checkpoint.

/// The metadata: cryopod's record of a checkpoint, in CRIU's image directory beside `inventory.img`.
pub const METADATA: &str = "cryopod.json";
/// The metadata while it is being written. Never read back: a restore that finds only this file treats the directory as
/// unrecorded.
pub const METADATA_PARTIAL: &str = ".cryopod.json.partial";
/// CRIU's inventory: its presence makes a directory a checkpoint.
pub const CRIU_INVENTORY: &str = "inventory.img";
/// In the work directory.
pub const DUMP_LOG: &str = "dump.log";
/// In the work directory.
pub const RESTORE_LOG: &str = "restore.log";

/// CRIU's images inside an engine's archive.
pub const CHECKPOINT_DIR: &str = "checkpoint";
/// CRIU's link from the images to those of the pre-dump.
pub const PARENT_LINK: &str = "parent";
/// The engine's description of the container; each engine has its own schema.
pub const CONFIG_DUMP: &str = "config.dump";
pub const SPEC_DUMP: &str = "spec.dump";
/// The container's state for Kubernetes (containerd's CRI).
pub const STATUS_DUMP: &str = "status.dump";
/// The container's network (podman).
pub const NETWORK_STATUS: &str = "network.status";
/// The files that the container has made or changed.
pub const ROOTFS_DIFF: &str = "rootfs-diff.tar";
/// In the image directory: the same, packed by cryopod at the moment of the dump, with whiteouts.
pub const CARRIED_ROOTFS: &str = "cryopod-rootfs.tar";
/// Files of the image that the container has deleted: a JSON list.
pub const DELETED_FILES: &str = "deleted.files";
/// The files of `/dev/shm` (podman).
pub const DEVSHM: &str = "devshm-checkpoint.tar";
/// Volumes, a tar each (podman).
pub const VOLUMES_DIR: &str = "volumes";
pub const STATS_DUMP: &str = "stats-dump";
/// Bind mounts (CRI-O).
pub const BIND_MOUNTS: &str = "bind.mounts";
/// The container's log path (CRI-O).
pub const CRIO_LOG_PATH: &str = "io.kubernetes.cri-o.LogPath";
/// Marks a directory as an OCI image layout.
pub const OCI_LAYOUT: &str = "oci-layout";
pub const OCI_INDEX: &str = "index.json";
pub const OCI_BLOBS: &str = "blobs";
/// The parts of containerd's checkpoint that no other engine has, as files of this directory.
pub const CONTAINERD_DIR: &str = "containerd";
/// In it: the changes of files, with whiteouts.
pub const CONTAINERD_RW: &str = "rw.tar";

/// The reference to the store that has a checkpoint's large files. In CRIU's image directory and in the store's entry.
pub const STORE_REFERENCE: &str = "cryopod-store.json";
/// Marks an image directory of containerd's that the shim keeps: its container has ended, and nobody packed it.
pub const ONLY_COPY: &str = ".cryopod-only-copy";
/// The log of cryopod's processes that no engine listens to.
pub const DETACHED_LOG: &str = "/var/log/cryopod-on-stop.log";
/// The list of a checkpoint's files in a place, with their digests.
pub const LISTING: &str = "cryopod-files.json";
pub const LISTING_PARTIAL: &str = ".cryopod-files.json.partial";
/// The store through which cryopod and its runtime hand large files to each other, past an engine.
pub const HANDOVER: &str = "cryopod-away";
pub const STORE_REFERENCE_PARTIAL: &str = ".cryopod-store.json.partial";

/// The VRAM files' table of chunks. Written last: without it the shards mean nothing.
pub const VRAM_INDEX: &str = "vram-index.img";
pub const VRAM_INDEX_PARTIAL: &str = ".vram-index.img.partial";

/// Where shards lie that are not in the image directory. Never in an archive: `cryopod import` writes it for one restore.
pub const VRAM_PLACES: &str = "vram-places.json";

/// The record of cryopod's CRIU plugin for NVIDIA. It names the buffers whose contents are in the VRAM files.
pub const NVIDIA_IMAGE: &str = "cryopod-nvidia.img";

/// The preload library that the container's processes have mapped.
pub const PRELOAD_LIBRARY: &str = "cryopod-preload.so";

/// Prefix of CRIU's memory files; a number and `.img` follow.
pub const PAGES: &str = "pages-";
/// Prefix of the VRAM files' shards; a number and `.img` follow.
pub const VRAM_SHARD: &str = "vram-";

/// Returns the file name of a shard: `vram-0000.img`.
pub fn vram_shard(number: usize) -> String {
    format!("{VRAM_SHARD}{number:04}.img")
}

/// Returns true for the path of a shard in an archive.
pub fn is_vram_shard(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or_default();
    is_numbered(name, VRAM_SHARD)
}

/// Returns the podman volume whose content is in the file of this name.
pub fn volume(file: &str) -> Option<&str> {
    let name = file.strip_prefix(VOLUMES_DIR)?.strip_prefix('/')?;
    name.strip_suffix(".tar").filter(|n| !n.contains('/'))
}

/// Smaller files are not worth a place of their own. In bytes.
const LARGE: u64 = 1 << 20;

/// Returns true for a file of pages or a shard of the VRAM files that is large enough to be moved away from the others.
pub fn is_large(name: &str, bytes: u64) -> bool {
    bytes >= LARGE && (is_numbered(name, VRAM_SHARD) || is_numbered(name, PAGES))
}

/// Returns true for a prefix, a number and `.img`.
pub fn is_numbered(name: &str, prefix: &str) -> bool {
    let number = name.strip_prefix(prefix);
    let number = number.and_then(|rest| rest.strip_suffix(".img"));
    number.is_some_and(|n| (1..=10).contains(&n.len()) && n.bytes().all(|b| b.is_ascii_digit()))
}
