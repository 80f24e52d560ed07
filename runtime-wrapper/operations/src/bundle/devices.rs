//! Edits the spec's device nodes: `linux.devices`, the rules of the device cgroup, bind mounts of nodes.
//!
//! An archive's word allows nothing. A node of the checkpoint gets a rule only in place of a node of the same kind that
//! the engine's own spec names and allows.

use std::collections::BTreeSet;
use std::path::Path;

use cryopod_archive::metadata::{EngineNode, MovedNode};
use cryopod_gpu_plan::ceiling::{AskedNode, Ceiling, Lifts};
use cryopod_gpu_plan::mapping::remap::{ANNOTATION, NodeTarget, Remap};
use cryopod_gpu_plan::plan::PlanError;
use cryopod_host::files::Host;
use cryopod_host::nodes;
use cryopod_host::nodes::{DeviceNode, NodeRole, NodeSource, Vendor};
use cryopod_host::spec::Spec;
use serde_json::{Map, Value, json};

use super::Edit;
use crate::error::Error;

/// Sets the container's device nodes and device rules to the GPUs of a restore.
#[derive(Debug)]
pub struct Devices<'a> {
    pub remap: &'a Remap,
}

type Number = (u64, u64);

/// Device majors that every container gets some nodes of (memory, terminals).
const COMMON_MAJORS: [u64; 3] = [1, 5, 136];

/// A node of the restored container, and the node of the engine's spec that it replaces.
struct Granted<'a> {
    target: &'a NodeTarget,
    path: String,
    number: Number,
}

impl Edit for Devices<'_> {
    fn name(&self) -> &'static str {
        "GPU device nodes and their cgroup rules"
    }

    fn apply(&self, host: &Host, spec: &mut Value) -> Result<(), Error> {
        let before = Spec::from_json(spec.clone());
        let granted = self.granted(host, &before)?;
        self.counted(host, &before, &granted)?;
        if granted
            .iter()
            .all(|g| g.path == g.target.path && g.number == number(g.target))
            && !self.mounts(host, &before, &mut spec.clone())?
        {
            return Ok(());
        }
        devices(spec, &granted);
        self.mounts(host, &before, spec)?;
        rules(spec, &before, &granted);
        self.note(spec, &granted);
        Ok(())
    }
}

/// Returns an error unless the engine's node may become the host node that the record chose.
fn admit(host: &Host, spec: &Spec, given: &str, target: &NodeTarget) -> Result<(), Error> {
    let ceiling = Ceiling {
        host,
        spec,
        lifts: Lifts::default(),
    };
    let asked = AskedNode::Node {
        given,
        host_path: &target.host_path,
    };
    let refused = |refusal| PlanError::RestoreRefused(vec![refusal]).into();
    ceiling.admit(asked).map_err(refused)
}

fn number(target: &NodeTarget) -> Number {
    (target.major, target.minor)
}

impl Devices<'_> {
    /// Returns the nodes that the engine's spec has, as a device or as a mount.
    ///
    /// The record comes with the archive, perhaps from a stranger. Only nodes that the spec itself names as a GPU's
    /// count, with the spec's own numbers, and each may only become a node of its own kind.
    fn granted(&self, host: &Host, spec: &Spec) -> Result<Vec<Granted<'_>>, Error> {
        let devices = spec.devices();
        let mounts = spec.mounts();
        let device = |path: &str| {
            nodes::classify(path)?;
            let d = devices.iter().find(|d| d.path().to_str() == Some(path))?;
            let number = (d.major().try_into().ok()?, d.minor().try_into().ok()?);
            Some((path.to_owned(), number))
        };
        let mounted = |path: &str| {
            let mount = mounts
                .iter()
                .filter(|m| Path::new(path).starts_with(m.destination()))
                .max_by_key(|m| m.destination().components().count())?;
            let below = Path::new(path).strip_prefix(mount.destination()).ok()?;
            let source = mount.source().as_ref()?;
            let source = match below.as_os_str().is_empty() {
                true => source.clone(),
                false => source.join(below),
            };
            let given = source.to_str()?.to_owned();
            nodes::classify(&given)?;
            let node = self.remap.recorded(path)?;
            let recorded = (node.major, node.minor);
            // The user wrote the rule for a mounted node. It names the number that the node had or has.
            let numbers = [host.char_device(&source), Some(recorded)];
            let mut numbers = numbers.into_iter().flatten();
            let known = numbers
                .clone()
                .find(|n| !COMMON_MAJORS.contains(&n.0) && spec.allows(n.0, n.1));
            let number = known.or_else(|| numbers.next())?;
            (node.source == NodeSource::BindMount).then_some((given, number))
        };
        let find = |target: &NodeTarget| {
            let own = device(&target.path).map(|found| (target.path.clone(), found));
            own.or_else(|| {
                self.remap
                    .engine_paths(&target.from)
                    .find_map(|p| Some((p.to_owned(), device(p).or_else(|| mounted(p))?)))
            })
            // In a copy only the node's other name is the engine's.
            .or_else(|| {
                let native = target.alias_of.as_ref()?;
                Some((native.clone(), device(native)?))
            })
        };
        let mut granted = Vec::new();
        for target in &self.remap.targets {
            let Some((path, (given, number))) = find(target) else {
                continue;
            };
            admit(host, spec, &given, target)?;
            granted.push(Granted {
                target,
                path,
                number,
            });
        }
        Ok(granted)
    }

    /// Refuses more GPUs than the engine gave, whatever the record says.
    fn counted(&self, host: &Host, spec: &Spec, granted: &[Granted<'_>]) -> Result<(), Error> {
        let leads_to_gpu = |n: &DeviceNode| matches!(n.role, NodeRole::Gpu | NodeRole::Render);
        let named = spec.gpu_nodes(host);
        for vendor in [Vendor::Nvidia, Vendor::Amd] {
            let ours = |n: &DeviceNode| n.vendor == vendor && leads_to_gpu(n);
            let given: BTreeSet<Number> = named
                .iter()
                .filter(|n| ours(n))
                .map(|n| (n.major, n.minor))
                .chain(granted.iter().map(|g| g.number).filter(|n| {
                    // A mounted node that this host lacks.
                    granted
                        .iter()
                        .any(|g| g.number == *n && self.remap.recorded(&g.path).is_some_and(ours))
                }))
                .collect();
            let wanted: BTreeSet<Number> = granted
                .iter()
                .filter(|g| self.remap.recorded(&g.target.from).is_some_and(ours))
                .map(|g| number(g.target))
                .collect();
            if wanted.len() > given.len() {
                return Err(Error::Failed(format!(
                    "the checkpoint has {} {vendor} GPUs and the engine gave the container {}; give it as many. The checkpoint is untouched",
                    wanted.len(),
                    given.len()
                )));
            }
        }
        Ok(())
    }

    /// Sets the source of single-node bind mounts to this host's node. Returns true if one changed.
    fn mounts(&self, host: &Host, before: &Spec, spec: &mut Value) -> Result<bool, Error> {
        let mut changed = false;
        for mount in list(spec, "/mounts") {
            let text = |key: &str| mount.get(key).and_then(Value::as_str);
            let (Some(to), Some(from)) = (text("destination"), text("source")) else {
                continue;
            };
            let known = self.remap.recorded(to).is_some_and(|n| {
                n.source == NodeSource::BindMount && n.host_path.as_deref() == Some(from)
            });
            let Some(target) = self.remap.targets.iter().find(|t| t.path == to) else {
                continue;
            };
            // The source that the engine resolved for this host stays, if it is the right node already.
            let right = host.char_device(from) == Some(number(target));
            if known && !right {
                admit(host, before, from, target)?;
                mount["source"] = target.host_path.clone().into();
                changed = true;
            }
        }
        Ok(changed)
    }

    /// Records the moved nodes in the spec, for the next checkpoint of this container.
    fn note(&self, spec: &mut Value, granted: &[Granted<'_>]) {
        let moved: Vec<MovedNode> = granted
            .iter()
            .filter(|g| g.path != g.target.path || g.number != number(g.target))
            .map(|g| MovedNode {
                path: g.target.path.clone(),
                alias_of: g.target.alias_of.clone(),
                engine: EngineNode {
                    path: g.path.clone(),
                    major: g.number.0,
                    minor: g.number.1,
                },
            })
            .collect();
        if let Ok(text) = serde_json::to_string(&moved)
            && let Some(spec) = spec.as_object_mut()
            && let Some(annotations) = spec
                .entry("annotations")
                .or_insert_with(|| Map::new().into())
                .as_object_mut()
        {
            annotations.insert(ANNOTATION.into(), text.into());
        }
    }
}

fn list<'a>(spec: &'a mut Value, pointer: &str) -> impl Iterator<Item = &'a mut Value> {
    spec.pointer_mut(pointer)
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
}

/// `linux.devices`: gives existing names their new numbers, and adds the new names after those that they stand for.
fn devices(spec: &mut Value, granted: &[Granted<'_>]) {
    let Some(devices) = spec
        .pointer_mut("/linux/devices")
        .and_then(Value::as_array_mut)
    else {
        return;
    };
    let named = |v: &Value, path: &str| v.get("path").and_then(Value::as_str) == Some(path);
    let before = devices.clone();
    for Granted { target, path, .. } in granted {
        let at = match devices.iter().position(|v| named(v, &target.path)) {
            Some(at) => at,
            None => {
                // A bind mount has no entry here, and its further names need none: no runtime makes nodes at a restore.
                let Some(model) = before.iter().find(|v| named(v, path)) else {
                    continue;
                };
                let at = devices.iter().position(|v| named(v, path));
                let at = at.map_or(devices.len(), |i| i + 1);
                devices.insert(at, model.clone());
                at
            }
        };
        if let Some(entry) = devices.get_mut(at) {
            entry["path"] = target.path.clone().into();
            entry["major"] = target.major.into();
            entry["minor"] = target.minor.into();
        }
    }
}

/// `linux.resources.devices`: gives the new nodes the access that the engine gave to the old ones.
fn rules(spec: &mut Value, before: &Spec, granted: &[Granted<'_>]) {
    let wanted: Vec<(Number, Number)> = granted
        .iter()
        .map(|g| (g.number, number(g.target)))
        .collect();
    let stays = |n: &Number| wanted.iter().any(|(_, new)| new == n);
    let exact = |rule: &Value| {
        let allow = rule.get("allow").and_then(Value::as_bool) == Some(true);
        let char = matches!(
            rule.get("type").and_then(Value::as_str),
            None | Some("c" | "u" | "a")
        );
        let n = |key: &str| rule.get(key).and_then(Value::as_u64);
        (allow && char).then(|| Some((n("major")?, n("minor")?)))?
    };
    let Some(list) = spec
        .pointer_mut("/linux/resources/devices")
        .and_then(Value::as_array_mut)
    else {
        return;
    };
    let old_rules = list.clone();
    list.retain(|rule| {
        let gone = exact(rule).filter(|n| wanted.iter().any(|(old, _)| old == n) && !stays(n));
        gone.is_none()
    });
    for (old, new) in &wanted {
        let had = old_rules.iter().rev().find(|r| exact(r) == Some(*old));
        let access = had
            .and_then(|r| r.get("access"))
            .and_then(Value::as_str)
            .unwrap_or("rwm");
        let there = list.iter().any(|r| {
            let same = r.get("access").and_then(Value::as_str).unwrap_or("rwm") == access;
            exact(r) == Some(*new) && same
        });
        let so_far = Spec::from_json(json!({"linux": {"resources": {"devices": list}}}));
        let lacking = match had {
            Some(_) => !there,
            None => before.allows(old.0, old.1) && !so_far.allows(new.0, new.1),
        };
        if lacking {
            list.push(
                json!({"allow": true, "type": "c", "major": new.0, "minor": new.1, "access": access}),
            );
        }
    }
}

#[cfg(test)]
mod tests;
