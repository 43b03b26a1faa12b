//! `cargo xtask compare`: servers of raw images, side by side.

use anyhow::{Context, Result, ensure};
use lab_tools::workspace::Workspace;

use crate::config::{Config, Options, chosen, write};
use crate::light::{self, Load};
use crate::measurement::Measurement;
use crate::report::{self, Environment};
use crate::results::{RowResult, StorageResult};
use crate::rows::{Client, ROWS, Row};
use crate::servers::{EXPORT, Format, Image, Kind, Server, Start};
use crate::storage::Storage;
use crate::{fio, vhost_user};

/// Compares, as `options` say.
pub fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    let mut rows = chosen(ROWS, |row| row.name, &options.rows)?;
    rows.retain(|row| options.export.contains(&row.client.export()));
    ensure!(!rows.is_empty(), "none of these rows is one of the chosen exports");
    let mut config = Config::new(workspace, options, rows, Kind::ALL)?;
    let disk = options.dir.clone().unwrap_or_else(|| workspace.target().to_owned());
    let environment = Environment::find(&config)?;
    report::terminal::environment(&environment);
    let mut results = Vec::new();
    for &kind in &options.storage {
        if let Some(why) = Storage::unavailable(kind) {
            println!("storage {kind:?} skipped: {why}");
            continue;
        }
        let size = options.size.checked_mul(1 << 20).context("--size is beyond 64 bits")?;
        let storage = Storage::create(kind, size, &disk, &config.interrupt)?;
        results.push(config.measure_storage(storage)?);
    }
    if let Some(file) = &options.markdown {
        write(file, &report::markdown::render(&environment, &results))?;
    }
    if let Some(file) = &options.json {
        write(file, &report::json::render(&environment, &results)?)?;
    }
    Ok(())
}

impl Config {
    fn measure_storage(&mut self, storage: Storage) -> Result<StorageResult> {
        report::terminal::storage(&storage);
        let mut rows = Vec::new();
        for row in self.rows.clone() {
            let result = self.measure_row(row, &storage)?;
            report::terminal::row(&storage, &result);
            rows.push(result);
        }
        Ok(StorageResult { storage, rows })
    }

    fn measure_row(&mut self, row: Row, storage: &Storage) -> Result<RowResult> {
        let mut servers: Vec<(Kind, Vec<Measurement>)> =
            self.servers.iter().map(|&kind| (kind, Vec::new())).collect();
        for _ in 0..self.rounds {
            for (kind, rounds) in servers.iter_mut().filter(|(kind, _)| kind.takes(row.client)) {
                let measured = self
                    .measure(row, *kind, storage)
                    .with_context(|| format!("{} on {}", row.name, kind.name()))?;
                rounds.push(measured);
            }
        }
        Ok(RowResult { row, servers })
    }

    fn measure(&mut self, row: Row, kind: Kind, storage: &Storage) -> Result<Measurement> {
        storage.prepare_cache(kind.caching())?;
        let folder = self.folder.path();
        let start = Start { kind, export: row.client.export(), queues: row.connections };
        let image = Image { storage, format: Format::Raw };
        let server = Server::start(start, &self.programs, image, folder, &self.interrupt)?;
        self.generation += 1;
        let load = Load {
            warm_up: self.duration / 10,
            duration: self.duration,
            content: kind.content(),
            ..row.load(self.generation)
        };
        let cpu = || server.cpu();
        let measured = match row.client {
            Client::Fio => fio::run(&row, &server, self.duration, folder, &self.interrupt)?,
            Client::Light => light::run(load, server.socket(), EXPORT, &cpu, &self.interrupt)?,
            Client::VhostUser => {
                vhost_user::run(load, self.poll_time, server.socket(), &cpu, &self.interrupt)?
            }
        };
        server.stop()?;
        ensure!(measured.requests > 0, "nothing was answered");
        Ok(measured)
    }
}
