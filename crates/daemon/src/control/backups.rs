//! The methods of backups.

use blockhouse_config::export_address::ExportAddress;
use blockhouse_config::text_fields::check_absolute;
use blockhouse_nbd::uri::NbdUri;
use serde_json::Value;

use super::backup_methods::{BackupBeginParams, BackupDiskInfo, BackupInfo, BackupParams};
use super::methods::{Done, NoParams};
use super::outcome::{Outcome, invalid, params, result, unknown};
use super::rpc::Failure;
use crate::running::backups::BackupSetup;
use crate::running::backups::begin_backup;
use crate::running::backups::end_backup;
use crate::running::{BackupDisk, Running, RunningBackup};

/// Executes a method `backup.*`.
pub(super) async fn call(running: &Running, method: &str, given: Value) -> Outcome {
    match method {
        "backup.list" => {
            let NoParams {} = params(given)?;
            let backups = running.backups().list();
            result(backups.iter().map(|backup| info(running, backup)).collect::<Vec<_>>())
        }
        "backup.begin" => {
            let backup = begin_backup(running, setup(params(given)?)?).await?;
            result(info(running, &backup))
        }
        "backup.end" => {
            let BackupParams { backup } = params(given)?;
            end_backup(running, &backup).await?;
            result(Done {})
        }
        _ => Err(unknown(method)),
    }
}

fn setup(given: BackupBeginParams) -> Result<BackupSetup, Failure> {
    let BackupBeginParams { disks, export, backup, bitmap, since, scratch, scratch_size } = given;
    if let Some(folder) = &scratch {
        check_absolute(folder).map_err(invalid)?;
    }
    let export = export.map(|export| address(&export)).transpose()?;
    Ok(BackupSetup { name: backup, disks, export, bitmap, since, scratch, scratch_size })
}

fn address(text: &str) -> Result<NbdUri, Failure> {
    match text.parse().map_err(invalid)? {
        ExportAddress::Nbd(uri) => Ok(uri),
        ExportAddress::VhostUser(_) | ExportAddress::Ublk(_) => {
            Err(invalid(format!("{text}: backups are served over NBD; give an NBD URI")))
        }
    }
}

fn info(running: &Running, backup: &RunningBackup) -> BackupInfo {
    BackupInfo {
        backup: backup.name.clone(),
        pause_us: backup.pause.as_micros() as u64,
        bitmap: backup.bitmap.clone(),
        since: backup.since.clone(),
        disks: backup.disks.iter().map(|disk| disk_info(running, disk)).collect(),
    }
}

fn disk_info(running: &Running, disk: &BackupDisk) -> BackupDiskInfo {
    let exports = running.exports().of_disk(disk.frozen.name()).into_iter();
    BackupDiskInfo {
        disk: disk.source().to_owned(),
        frozen: disk.frozen.name().to_owned(),
        exports: exports.map(|export| export.address.to_string()).collect(),
        since: disk.since.clone(),
        size: disk.frozen.disk.size(),
        scratch_used: disk.view.scratch_used(),
        scratch_size: disk.scratch_limit,
        error: disk.view.failure().map(ToOwned::to_owned),
    }
}
