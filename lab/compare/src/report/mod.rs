//! From measurements to figures: rates, processor time per request, ratios to the best peer.

pub mod json;
pub mod markdown;
pub mod terminal;

use std::fmt::Display;

use anyhow::{Context, Result};

use super::caching::Caching;
use super::config::Config;
use super::fio;
use super::measurement::Measurement;
use super::results::RowResult;
use super::servers::Kind;
use super::storage::Storage;
use blockhouse_figures::{Spread, median_interval};

/// The conditions, other than the programs, that the figures depend on.
pub struct Environment {
    /// The number of processors that this process may use, and their name.
    pub processor: String,
    /// The kernel's release up to the first hyphen, without the builder's suffix.
    pub kernel: String,
    /// Names with versions of the servers and of fio.
    pub versions: Vec<(String, String)>,
    /// Rounds of each measurement.
    pub rounds: usize,
    /// Seconds of each measurement.
    pub seconds: f64,
    /// The arguments of our server besides those that its name implies.
    pub serve_args: String,
}

impl Environment {
    /// Finds the data of this machine and of the programs of `config`.
    pub fn find(config: &Config) -> Result<Self> {
        let mut versions: Vec<(String, String)> = Vec::new();
        for &kind in &config.servers {
            versions.push((kind.name().to_owned(), kind.version(&config.programs)?));
        }
        versions.push(("fio".to_owned(), fio::version()?));
        Ok(Self {
            processor: processor()?,
            kernel: kernel(),
            versions,
            rounds: config.rounds,
            seconds: config.duration.as_secs_f64(),
            serve_args: config.programs.serve_args.join(" "),
        })
    }
}

/// The number of processors that this process may use, and their name.
pub fn processor() -> Result<String> {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").context("cannot read cpuinfo")?;
    let model = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map_or("unnamed processor", |(_, model)| model);
    Ok(format!("{} x {model}", std::thread::available_parallelism()?))
}

/// The kernel's release up to the first hyphen, without the builder's suffix.
pub fn kernel() -> String {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy();
    format!("Linux {}", release.split('-').next().unwrap_or_default())
}

/// A figure as text with this many digits; empty without measurements.
pub fn cell(figure: Option<impl Display>, digits: usize) -> String {
    figure.map_or_else(String::new, |figure| format!("{figure:.digits$}"))
}

/// The [`Spread`] of values as a [`cell`].
pub fn spread(values: impl IntoIterator<Item = f64>, digits: usize) -> String {
    cell(Spread::of(values), digits)
}

/// A quantity that is reported for a server in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Figure {
    /// Thousands of requests, or MiB, a second.
    Rate,
    /// Microseconds of processor time that the server used for a request.
    ServerCpu,
    /// Microseconds of processor time that the client used for a request.
    ClientCpu,
    /// Share of one processor that the client used, in percent.
    ClientBusy,
    /// Median latency in microseconds.
    MedianLatency,
    /// 99th percentile of the latency in microseconds.
    P99Latency,
}

impl RowResult {
    /// The unit of [`Figure::Rate`] in this row.
    pub fn unit(&self) -> &'static str {
        if self.row.is_bandwidth() { "MiB/s" } else { "kIOPS" }
    }

    fn figure(&self, figure: Figure, measured: &Measurement) -> f64 {
        match figure {
            Figure::Rate if self.row.is_bandwidth() => measured.mebibytes_a_second(self.row.block),
            Figure::Rate => measured.requests_a_second() / 1e3,
            Figure::ServerCpu => measured.cpu_a_request(),
            Figure::ClientCpu => measured.client_cpu.as_secs_f64() * 1e6 / measured.requests as f64,
            Figure::ClientBusy => {
                100.0 * measured.client_cpu.as_secs_f64() / measured.elapsed.as_secs_f64()
            }
            Figure::MedianLatency => measured.latency.median.as_secs_f64() * 1e6,
            Figure::P99Latency => measured.latency.p99.as_secs_f64() * 1e6,
        }
    }

    /// `figure` of each round of `server`.
    fn rounds(&self, figure: Figure, server: Kind) -> Vec<f64> {
        let rounds = self.servers.iter().find(|(kind, _)| *kind == server);
        let rounds = rounds.map_or(&[][..], |(_, rounds)| rounds);
        rounds.iter().map(|measured| self.figure(figure, measured)).collect()
    }

    /// `figure` of `server` over the rounds, if it took part.
    pub fn spread(&self, figure: Figure, server: Kind) -> Option<Spread> {
        Spread::of(self.rounds(figure, server))
    }

    fn median(&self, figure: Figure, server: Kind) -> f64 {
        self.spread(figure, server).map_or(f64::NAN, |spread| spread.median)
    }

    /// The servers that were measured in this row.
    fn took_part(&self) -> impl Iterator<Item = Kind> {
        self.servers.iter().filter(|(_, rounds)| !rounds.is_empty()).map(|(kind, _)| *kind)
    }

    /// Each of our servers in this row, compared with its peers.
    pub fn comparisons(&self, storage: &Storage) -> Vec<Comparison> {
        let ours = self.took_part().filter(|kind| kind.is_ours());
        ours.filter_map(|ours| self.comparison(ours, storage)).collect()
    }

    fn comparison(&self, ours: Kind, storage: &Storage) -> Option<Comparison> {
        let peers = || {
            self.took_part().filter(|kind| {
                !kind.is_ours() && storage.comparable(ours.caching(), kind.caching())
            })
        };
        let ceilings = self.took_part().filter(|kind| kind.caching() == Caching::Null);
        let by = |figure| {
            move |one: &Kind, other: &Kind| {
                self.median(figure, *one).total_cmp(&self.median(figure, *other))
            }
        };
        let against = |figure, peer| {
            let (ours, theirs) = (self.rounds(figure, ours), self.rounds(figure, peer));
            let ratio = Spread::of_ratios(&ours, &theirs)?;
            let interval = median_interval(ours.iter().zip(&theirs).map(|(one, two)| one / two));
            Some(Against { peer, ratio, interval })
        };
        Some(Comparison {
            ours,
            rate: against(Figure::Rate, peers().max_by(by(Figure::Rate))?)?,
            server_cpu: against(Figure::ServerCpu, peers().min_by(by(Figure::ServerCpu))?)?,
            ceiling: ceilings.max_by(by(Figure::Rate)).and_then(|peer| against(Figure::Rate, peer)),
        })
    }
}

/// A ratio to a peer.
pub struct Against {
    /// The peer.
    pub peer: Kind,
    /// Our figure divided by the peer's, round by round.
    pub ratio: Spread,
    /// The 95 % confidence interval of the ratio's median; `None` if there are too few rounds.
    pub interval: Option<(f64, f64)>,
}

/// How one of our servers compares with its peers in a row.
pub struct Comparison {
    /// Our server.
    pub ours: Kind,
    /// Against the fastest peer; above 1 is better.
    pub rate: Against,
    /// Against the peer that needs the least processor time a request; below 1 is better.
    pub server_cpu: Against,
    /// Against the fastest server without storage.
    pub ceiling: Option<Against>,
}
