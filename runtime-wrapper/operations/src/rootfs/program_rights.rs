//! Takes from carried programs what the container's processes could not have given them: another user or group, or
//! capabilities.
//!
//! The tar may be a stranger's. In a container of a plain user, one exec of root's set-user-id program would give root
//! and the bounding set. The image may have such programs; the administrator chose it.

use std::path::PathBuf;

use cryopod_host::processes::id_map::IdMap;
use cryopod_host::spec::Spec;
use tar::EntryType;

use super::records::TarRecord;
use crate::config::Config;
use crate::security::ceiling::CredentialsCeiling;

/// Programs that the warning names.
const NAMED: usize = 5;

#[derive(Debug)]
pub struct ProgramRights {
    /// `None`: the configuration lifts it.
    ceiling: Option<CredentialsCeiling>,
    uids: IdMap,
    gids: IdMap,
    /// Those that have lost something.
    limited: Vec<PathBuf>,
}

impl ProgramRights {
    pub fn of(config: &Config, spec: &Spec) -> Self {
        let ceiling = || CredentialsCeiling::of(spec);
        Self {
            ceiling: config.compares_privileges().then(ceiling),
            uids: IdMap::of_spec(spec.json(), "uidMappings"),
            gids: IdMap::of_spec(spec.json(), "gidMappings"),
            limited: Vec::new(),
        }
    }

    /// Limits the mode and the capabilities of a file. A directory's bits give nobody's rights.
    pub fn limit(&mut self, record: &mut TarRecord<'_>) -> std::io::Result<()> {
        let Some(ceiling) = &self.ceiling else {
            return Ok(());
        };
        // A whiteout has no mode and no owner.
        let mode = record.header.mode().unwrap_or(0);
        let plain = mode & (libc::S_ISUID | libc::S_ISGID) == 0 && record.capability.is_none();
        if plain || record.header.entry_type() != EntryType::Regular {
            return Ok(());
        }
        let inside = |map: &IdMap, id: u64| match map.is_empty() {
            true => Some(id),
            false => map.inside(id),
        };
        let (uid, gids) = ceiling.ids();
        let owner = inside(&self.uids, record.header.uid()?);
        let group = inside(&self.gids, record.header.gid()?);
        let mut allowed = !0;
        if owner != Some(uid.into()) && !ceiling.has("SETUID") {
            allowed &= !libc::S_ISUID;
        }
        if !gids.iter().any(|gid| group == Some((*gid).into())) && !ceiling.has("SETGID") {
            allowed &= !libc::S_ISGID;
        }
        let drops_capability = record.capability.is_some() && !ceiling.has("SETFCAP");
        if mode & !allowed != 0 || drops_capability {
            record.header.set_mode(mode & allowed);
            record.capability = record.capability.take().filter(|_| !drops_capability);
            self.limited.push(record.path.clone());
        }
        Ok(())
    }

    /// Logs which programs have lost something.
    pub fn warn(&self) {
        if self.limited.is_empty() {
            return;
        }
        let named = self.limited.iter().take(NAMED);
        let named: Vec<_> = named.map(|p| format!("/{}", p.display())).collect();
        let more = match self.limited.len() > NAMED {
            true => ", ...",
            false => "",
        };
        tracing::warn!(
            "{} files of the checkpoint are restored without set-user-id, set-group-id or capabilities, which the \
             container's processes could not give them: {}{more}",
            self.limited.len(),
            named.join(", ")
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::PRIVILEGES_CHECK;
    use serde_json::{Value, json};

    /// The mode of a file of this owner after the limit, and whether it keeps a capability.
    fn limited(rights: &mut ProgramRights, mode: u32, owner: [u64; 2]) -> (u32, bool) {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(EntryType::Regular);
        header.set_mode(mode);
        header.set_uid(owner[0]);
        header.set_gid(owner[1]);
        let mut record = TarRecord {
            path: "program".into(),
            link: None,
            capability: Some(vec![1]),
            literal: false,
            header,
            content: &mut std::io::empty(),
        };
        rights.limit(&mut record).unwrap();
        (record.header.mode().unwrap(), record.capability.is_some())
    }

    fn spec(uid: u32, capabilities: &Value) -> Value {
        json!({"process": {
            "user": {"uid": uid, "gid": 50, "additionalGids": [51]},
            "capabilities": {"bounding": capabilities}
        }})
    }

    #[test]
    fn a_stranger_brings_no_other_rights() {
        let usual = json!(["CAP_SETUID", "CAP_SETGID", "CAP_SETFCAP"]);
        let mut in_namespace = spec(7, &usual);
        let ids = json!([{"containerID": 0, "hostID": 1000, "size": 100}]);
        in_namespace["linux"] = json!({"uidMappings": ids, "gidMappings": ids});
        let mut no_new_privileges = spec(0, &usual);
        no_new_privileges["process"]["noNewPrivileges"] = true.into();
        for (spec, owner, expected) in [
            // The bounding set is not what a plain user has.
            (&spec(7, &usual), [0, 0], (0o755, false)),
            (&spec(7, &usual), [7, 0], (0o4755, false)),
            (&spec(7, &usual), [0, 51], (0o2755, false)),
            // Root gets it at an exec.
            (&spec(0, &usual), [8, 8], (0o6755, true)),
            (&spec(0, &json!([])), [0, 50], (0o6755, false)),
            (&spec(0, &json!([])), [8, 0], (0o755, false)),
            (&no_new_privileges, [8, 50], (0o2755, false)),
            (&in_namespace, [1007, 1050], (0o6755, false)),
            (&in_namespace, [7, 50], (0o755, false)),
        ] {
            let mut rights = ProgramRights::of(&Config::default(), &Spec::from_json(spec.clone()));
            let found = limited(&mut rights, 0o6755, owner);
            assert_eq!(found, expected, "{spec} {owner:?}");
            assert_eq!(rights.limited.len(), usize::from(found != (0o6755, true)));
        }
    }

    #[test]
    fn the_administrator_lifts_it() {
        let mut config = Config::default();
        config.checks.insert(PRIVILEGES_CHECK.into(), false);
        let mut rights = ProgramRights::of(&config, &Spec::from_json(spec(7, &json!([]))));
        assert_eq!(limited(&mut rights, 0o4755, [0, 0]), (0o4755, true));
    }
}
