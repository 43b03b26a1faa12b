//! `cargo xtask compare`: servers of raw images, side by side.

use anyhow::{Context, Result, ensure};
use lab_tools::workspace::Workspace;

use crate::config::{Config, Options, chosen};
use crate::light::{self, Content, Load};
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
        let size = options.bytes()?;
        let storage = Storage::create(kind, size, &disk, &config.interrupt)?;
        results.push(config.measure_storage(storage)?);
    }
    options.write_files(
        || Ok(report::markdown::render(&environment, &results)),
        || report::json::render(&environment, &results),
    )
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
        let kinds: Vec<Kind> =
            self.servers.iter().copied().filter(|kind| kind.takes(row.client)).collect();
        let mut running = Vec::new();
        if self.alternate {
            for &kind in &kinds {
                running.push(self.start(row, kind, storage)?);
            }
        }
        let mut servers: Vec<(Kind, Vec<Measurement>)> =
            self.servers.iter().map(|&kind| (kind, Vec::new())).collect();
        let mut taking_part: Vec<_> =
            servers.iter_mut().filter(|(kind, _)| kinds.contains(kind)).collect();
        for round in 0..self.rounds {
            for turn in 0..taking_part.len() {
                // Every second round has the reverse order: otherwise what a server leaves in the
                // caches would always help the same next server.
                let index = if round % 2 == 0 { turn } else { taking_part.len() - 1 - turn };
                let (kind, rounds) = &mut taking_part[index];
                let measured = match running.get(index) {
                    Some(server) => self.load(row, kind.content(), server),
                    None => self.measure(row, *kind, storage),
                };
                rounds.push(measured.with_context(|| format!("{} on {}", row.name, kind.name()))?);
            }
        }
        running.into_iter().try_for_each(Server::stop)?;
        Ok(RowResult { row, servers })
    }

    fn measure(&mut self, row: Row, kind: Kind, storage: &Storage) -> Result<Measurement> {
        let server = self.start(row, kind, storage)?;
        let measured = self.load(row, kind.content(), &server)?;
        server.stop()?;
        Ok(measured)
    }

    fn start(&self, row: Row, kind: Kind, storage: &Storage) -> Result<Server> {
        storage.prepare_cache(kind.caching())?;
        let start = Start { kind, export: row.client.export(), queues: row.connections };
        let image = Image { storage, format: Format::Raw };
        Server::start(start, &self.programs, image, self.folder.path(), &self.interrupt)
    }

    /// One measurement of a server of an image with this content.
    pub fn load(&mut self, row: Row, content: Content, server: &Server) -> Result<Measurement> {
        self.generation += 1;
        let load = Load {
            warm_up: self.duration / 10,
            duration: self.duration,
            content,
            ..row.load(self.generation)
        };
        let cpu = || server.cpu();
        let measured = match row.client {
            Client::Fio => {
                fio::run(&row, server, self.duration, self.folder.path(), &self.interrupt)?
            }
            Client::Light => light::run(load, server.socket(), EXPORT, &cpu, &self.interrupt)?,
            Client::VhostUser => {
                vhost_user::run(load, self.poll_time, server.socket(), &cpu, &self.interrupt)?
            }
        };
        ensure!(measured.requests > 0, "nothing was answered");
        Ok(measured)
    }
}
