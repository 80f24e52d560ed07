//! Refuses a restore for which the container or its host has too little: processes, process ids, memory, ports.
//!
//! CRIU makes all of that late, and its error names a symptom: that a tmpfs cannot be filled, that a process was killed.

use cryopod_archive::criu::needs::{Port, Protocol, RestoreNeeds};
use cryopod_gpu_plan::checks::nvidia_compat::{meminfo, memory_limit};
use cryopod_gpu_plan::refusal::Refusal;
use cryopod_host::files::Host;
use cryopod_host::spec::Spec;

use crate::security::host_facts::in_network;

/// Returns what is too little or taken.
pub fn lacking(needs: &RestoreNeeds, host: &Host, spec: &Spec) -> Vec<Refusal> {
    let mut all = Vec::new();
    let mut refuse = |what: String, remedy: &str| all.push(Refusal::new(what, remedy));
    let pids = spec.json().pointer("/linux/resources/pids/limit");
    if let Some(limit) = pids.and_then(|n| u64::try_from(n.as_i64()?).ok())
        && limit > 0
        && needs.tasks > limit
    {
        refuse(
            format!(
                "the checkpoint has {} processes and threads, and the container may have {limit}",
                needs.tasks
            ),
            "start it with a higher limit (podman, docker: --pids-limit)",
        );
    }
    let highest = host.line("/proc/sys/kernel/pid_max");
    if let Some(end) = highest.and_then(|text| text.trim().parse::<u64>().ok())
        && needs.highest_pid >= end
    {
        refuse(
            format!(
                "the checkpoint has the process id {}, and kernel.pid_max of this host is {end}",
                needs.highest_pid
            ),
            "raise it (sysctl kernel.pid_max=4194304)",
        );
    }
    if let Some(limit) = memory_limit(spec)
        && needs.memory > limit.saturating_add(meminfo(host, "SwapTotal:").unwrap_or(0))
    {
        refuse(
            format!(
                "a process of the checkpoint has {} MiB of memory, and the container's limit is {} MiB",
                needs.memory >> 20,
                limit >> 20
            ),
            "start it with a higher limit (podman, docker: --memory)",
        );
    }
    if !needs.ports.is_empty() {
        let used = in_network(host, spec, || Some(used(host))).unwrap_or_default();
        let taken = |port: &&Port| used.iter().any(|other| port.excludes(other));
        for port in needs.ports.iter().filter(taken) {
            let (name, option) = match port.protocol {
                Protocol::Tcp => ("TCP", 't'),
                Protocol::Udp => ("UDP", 'u'),
            };
            refuse(
                format!(
                    "the checkpoint has the {name} port {}, which another process has in the container's network",
                    port.number
                ),
                &format!(
                    "end that process (`ss -{option}lnp` shows it), or give the container a network of its own before its checkpoint"
                ),
            );
        }
    }
    all
}

/// The ports of this thread's network namespace that are in use.
fn used(host: &Host) -> Vec<Port> {
    let mut all = Vec::new();
    for (protocol, file, state) in [
        (Protocol::Tcp, "tcp", "0A"),
        (Protocol::Tcp, "tcp6", "0A"),
        (Protocol::Udp, "udp", "07"),
        (Protocol::Udp, "udp6", "07"),
    ] {
        let text = host.text(format!("/proc/thread-self/net/{file}"));
        let text = text.unwrap_or_default();
        // `0: 00000000:1E61 00000000:0000 0A ...`
        for line in text.lines() {
            let mut words = line.split_whitespace().skip(1);
            let (own, found) = (words.next(), words.nth(1));
            if found == Some(state) {
                all.extend(own.and_then(|own| port(protocol, own)));
            }
        }
    }
    all
}

fn port(protocol: Protocol, text: &str) -> Option<Port> {
    let (address, number) = text.split_once(':')?;
    let words = address.as_bytes().chunks(8);
    let hex = |digits: &str| u64::from_str_radix(digits, 16).ok();
    let address = words.map(|word| hex(std::str::from_utf8(word).ok()?));
    Some(Port {
        protocol,
        number: hex(number)?,
        address: address.collect::<Option<_>>()?,
    })
}

#[cfg(test)]
mod tests {
    use cryopod_test_files::TestFiles;
    use serde_json::json;

    use super::*;

    #[test]
    fn each_is_told_with_both_sides() {
        let dir = tempfile::tempdir().unwrap();
        let proc = dir.path().join("proc");
        proc.put("sys/kernel/pid_max", "32768\n");
        proc.put("meminfo", "MemTotal: 9 kB\nSwapTotal:  1024 kB\n");
        let tcp = "  sl  local_address rem_address   st\n   0: 0100007F:1E61 00000000:0000 0A 0\n   1: 0100007F:0050 00000000:0000 01 0\n";
        proc.put("thread-self/net/tcp", tcp);
        let any = "0".repeat(32);
        let udp = format!("  sl\n   0: {any}:0035 {any}:0000 07 0\n");
        proc.put("thread-self/net/udp6", udp);
        let host = Host::at(dir.path());
        let spec = |limit: i64| {
            let resources = json!({"pids": {"limit": limit}, "memory": {"limit": limit << 20}});
            Spec::from_json(json!({"linux": {"resources": resources}}))
        };
        let tcp = |number| Port {
            protocol: Protocol::Tcp,
            number,
            address: vec![0],
        };
        let dns = Port {
            protocol: Protocol::Udp,
            number: 53,
            address: vec![0, 0, 0, 1],
        };
        let needs = RestoreNeeds {
            tasks: 6,
            highest_pid: 32767,
            memory: 6 << 20,
            ports: vec![tcp(80)],
        };
        assert_eq!(lacking(&needs, &host, &spec(6)), []);
        assert_eq!(lacking(&needs, &host, &spec(-1)), []);
        let needs = RestoreNeeds {
            tasks: 7,
            highest_pid: 32768,
            memory: (7 << 20) + 1,
            ports: vec![tcp(7777), dns],
        };
        let told = lacking(&needs, &host, &spec(6));
        let told: Vec<&str> = told.iter().map(|r| r.what.as_str()).collect();
        for (told, parts) in told.iter().zip([
            ["7 processes", "may have 6"],
            ["id 32768", "pid_max of this host is 32768"],
            ["7 MiB", "limit is 6 MiB"],
            ["TCP port 7777", "another process"],
            ["UDP port 53", "another process"],
        ]) {
            assert!(parts.iter().all(|part| told.contains(part)), "{told}");
        }
        assert_eq!(told.len(), 5);
    }
}
