//! `cryopod metrics`: prints what this host's operations took, in Prometheus' text format, for node-exporter's textfile
//! collector.

use std::fmt::Write;
use std::process::ExitCode;

use anyhow::Context;
use cryopod_operations::run::metrics::{self, Totals};

use crate::terminal::output;

#[derive(clap::Args)]
pub struct Args {
    /// Write to this file, in one step; by default to standard output.
    #[arg(short, long, default_value = "-", value_name = "FILE")]
    output: String,
}

/// Runs `cryopod metrics`, and returns its exit code.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let path = metrics::path();
    let totals = metrics::read(&path).with_context(|| path.display().to_string())?;
    output::write(&args.output, text(&totals).as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// Labels and value.
type Sample<'a> = (Vec<(&'a str, &'a str)>, String);

fn text(totals: &Totals) -> String {
    let mut out = String::new();
    let version = vec![("version", env!("CARGO_PKG_VERSION"))];
    let what = "build_info gauge The version of cryopod that wrote these numbers.";
    metric(&mut out, what, vec![(version, "1".into())]);
    let all = &totals.operations;
    let each = |sample: &dyn Fn(&metrics::OperationCounts) -> String| -> Vec<Sample<'_>> {
        let samples = all
            .iter()
            .map(|(name, op)| (vec![("operation", name.as_str())], sample(op)));
        samples.collect()
    };
    let mut results = Vec::new();
    let (mut reasons, mut steps, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
    for (name, op) in all {
        let own = |key, value| vec![("operation", name.as_str()), (key, value)];
        let failed: u64 = op.failed.values().fold(0, |sum, n| sum.saturating_add(*n));
        results.push((own("result", "success"), op.succeeded.to_string()));
        results.push((own("result", "failure"), failed.to_string()));
        for (reason, n) in &op.failed {
            reasons.push((own("reason", reason.as_str()), n.to_string()));
        }
        for (step, micros) in &op.steps {
            steps.push((own("step", step.as_str()), seconds(*micros)));
        }
        for (kind, n) in &op.bytes {
            bytes.push((own("kind", kind.as_str()), n.to_string()));
        }
    }
    let totals = each(&|op| seconds(op.micros));
    let (ends, lasts) = (
        each(&|op| op.last_at.to_string()),
        each(&|op| seconds(op.last_micros)),
    );
    for (what, samples) in [
        ("operations_total counter Operations, by result.", results),
        (
            "failures_total counter Operations that failed, by reason.",
            reasons,
        ),
        (
            "operation_seconds_total counter Seconds of the operations that succeeded.",
            totals,
        ),
        (
            "step_seconds_total counter Seconds of the steps of operations that succeeded, of the slowest process.",
            steps,
        ),
        (
            "bytes_total counter Bytes of the operations that succeeded, by kind.",
            bytes,
        ),
        (
            "last_success_timestamp_seconds gauge When the last operation that succeeded ended.",
            ends,
        ),
        (
            "last_success_seconds gauge How long the last operation that succeeded took.",
            lasts,
        ),
    ] {
        metric(&mut out, what, samples);
    }
    out
}

/// `what`: the metric's name, its kind and its help.
fn metric(out: &mut String, what: &str, samples: Vec<Sample<'_>>) {
    let mut words = what.splitn(3, ' ').map(str::to_owned);
    let [name, kind, help] = std::array::from_fn(|_| words.next().unwrap_or_default());
    if samples.is_empty() {
        return;
    }
    let _ = writeln!(
        out,
        "# HELP cryopod_{name} {help}\n# TYPE cryopod_{name} {kind}"
    );
    for (labels, value) in samples {
        let labels: Vec<String> = labels
            .iter()
            .map(|(key, value)| format!("{key}=\"{}\"", escaped(value)))
            .collect();
        let _ = writeln!(out, "cryopod_{name}{{{}}} {value}", labels.join(","));
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

fn seconds(micros: u64) -> String {
    format!("{:.6}", micros as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prometheus_text() {
        let mut totals = Totals::default();
        assert_eq!(text(&totals).lines().count(), 3, "{}", text(&totals));
        let op = metrics::OperationCounts {
            succeeded: 3,
            failed: [("driver".to_owned(), 2), ("refused".to_owned(), 1)].into(),
            micros: 1_500_000,
            steps: [("dump".to_owned(), 250_000)].into(),
            bytes: [("gpu".to_owned(), 1 << 30)].into(),
            last_at: 1_700_000_000,
            last_micros: 2,
        };
        totals.operations.insert("checkpoint".into(), op);
        totals
            .operations
            .insert("a\"b\\c\nd".into(), metrics::OperationCounts::default());
        let text = text(&totals);
        for want in [
            "# TYPE cryopod_operations_total counter\n",
            "cryopod_operations_total{operation=\"checkpoint\",result=\"success\"} 3\n",
            "cryopod_operations_total{operation=\"checkpoint\",result=\"failure\"} 3\n",
            "cryopod_failures_total{operation=\"checkpoint\",reason=\"driver\"} 2\n",
            "cryopod_operation_seconds_total{operation=\"checkpoint\"} 1.500000\n",
            "cryopod_step_seconds_total{operation=\"checkpoint\",step=\"dump\"} 0.250000\n",
            "cryopod_bytes_total{operation=\"checkpoint\",kind=\"gpu\"} 1073741824\n",
            "cryopod_last_success_timestamp_seconds{operation=\"checkpoint\"} 1700000000\n",
            "{operation=\"a\\\"b\\\\c\\nd\",result=\"success\"} 0\n",
        ] {
            assert!(text.contains(want), "{want}{text}");
        }
        // A metric's HELP and TYPE come once, and before its samples.
        for line in text.lines().filter(|l| l.starts_with("# TYPE")) {
            assert_eq!(text.matches(line).count(), 1, "{line}");
        }
    }

    /// Every metric of the example's dashboard is one that is written, with these labels.
    #[test]
    fn the_dashboard_asks_for_what_is_there() {
        let dashboard = include_str!("../../../examples/grafana/cryopod.json");
        let json: serde_json::Value = serde_json::from_str(dashboard).unwrap();
        let op = metrics::OperationCounts {
            failed: [("driver".to_owned(), 1)].into(),
            steps: [("dump".to_owned(), 1)].into(),
            bytes: [("gpu".to_owned(), 1)].into(),
            ..metrics::OperationCounts::default()
        };
        let mut totals = Totals::default();
        totals.operations.insert("checkpoint".into(), op);
        let written = text(&totals);
        let mut asked = 0;
        for panel in json["panels"].as_array().unwrap() {
            for target in panel["targets"].as_array().unwrap() {
                let expr = target["expr"].as_str().unwrap();
                for word in expr.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')) {
                    if word.starts_with("cryopod_") {
                        asked += 1;
                        assert!(written.contains(&format!("# TYPE {word} ")), "{word}");
                    }
                }
                for label in ["operation", "step", "kind", "reason", "result"] {
                    if expr.contains(label) {
                        assert!(written.contains(&format!("{label}=\"")), "{label}");
                    }
                }
            }
        }
        assert!(asked >= 7, "{asked}");
    }
}
