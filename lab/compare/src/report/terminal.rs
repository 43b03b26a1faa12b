//! The report as it grows on the terminal, row by row.

use super::{Environment, Figure};
use crate::results::RowResult;
use crate::storage::Storage;

/// Prints the conditions that the figures depend on.
pub fn environment(environment: &Environment) {
    println!("{}, {}", environment.processor, environment.kernel);
    for (name, version) in &environment.versions {
        println!("  {name}: {version}");
    }
    let Environment { rounds, seconds, .. } = environment;
    println!("{rounds} rounds of {seconds} s; figures are medians (smallest..largest)");
}

/// Prints a storage's headline.
pub fn storage(storage: &Storage) {
    println!("\n{}, {} MiB", storage.description(), storage.size() >> 20);
}

/// Prints a finished row.
pub fn row(storage: &Storage, result: &RowResult) {
    println!(
        "\n  {:22}{:>24}{:>22}{:>11}{:>8}{:>9}{:>9}{:>9}",
        result.row.name,
        result.unit(),
        "server us/req",
        "client us",
        "client%",
        "p50 us",
        "p99 us",
        "checked",
    );
    for (kind, rounds) in &result.servers {
        let spread = |figure| result.spread(figure, *kind);
        let (Some(rate), Some(server_cpu)) = (spread(Figure::Rate), spread(Figure::ServerCpu))
        else {
            continue;
        };
        let median = |figure| spread(figure).map_or(f64::NAN, |spread| spread.median);
        println!(
            "  {:22}{rate:>24.1}{server_cpu:>22.2}{:>11.2}{:>8.0}{:>9.0}{:>9.0}{:>9}",
            kind.name(),
            median(Figure::ClientCpu),
            median(Figure::ClientBusy),
            median(Figure::MedianLatency),
            median(Figure::P99Latency),
            rounds.iter().map(|measured| measured.verified).sum::<u64>(),
        );
    }
    for comparison in result.comparisons(storage) {
        let (rate, cpu) = (&comparison.rate, &comparison.server_cpu);
        println!(
            "  {}: rate {:.2} of {}; server CPU {:.2} of {}",
            comparison.ours.name(),
            rate.ratio,
            rate.peer.name(),
            cpu.ratio,
            cpu.peer.name(),
        );
        if let (Some(rate), Some(cpu)) = (rate.interval, cpu.interval) {
            println!(
                "    medians, in 95 of 100 such series: rate {:.3}..{:.3}, server CPU {:.3}..{:.3}",
                rate.0, rate.1, cpu.0, cpu.1,
            );
        }
        if let Some(ceiling) = &comparison.ceiling {
            println!("    rate {:.2} of {}", ceiling.ratio, ceiling.peer.name());
        }
    }
}
