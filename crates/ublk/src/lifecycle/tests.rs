//! Tests of the steps with a fake driver, which answers as `ublk_drv.c` does.

use std::collections::BTreeMap;

use super::*;
use crate::parameters::example as parameters;

/// `EEXIST`, `EBUSY`.
const EXISTS: i32 = 17;
const BUSY: i32 = 16;
const OWN: i32 = 100;
const OTHER: i32 = 200;
const SIZE: u64 = 1 << 30;

#[derive(Clone)]
struct FakeDevice {
    info: UblkInfo,
    parameters: Vec<u8>,
    /// A process has the character device open.
    is_open: bool,
    /// The last server that began a recovery had fetched no queue. Then Linux before 6.16 refuses a
    /// second recovery.
    is_unfetched: bool,
    /// Something has its block device open: it stays when it is deleted.
    is_used: bool,
}

#[derive(Default)]
struct FakeDriver {
    features: u64,
    devices: BTreeMap<u32, FakeDevice>,
    processes: Vec<i32>,
    /// Commands that change something.
    changes: Vec<(UblkCommand, u32)>,
    pauses: u32,
    /// The event at this pause.
    events: BTreeMap<u32, fn(&mut FakeDriver)>,
    refused: Option<UblkCommand>,
    /// How many stops are cancelled, because no worker can be made for them.
    cancelled_stops: u32,
    /// This process is outside of the initial PID namespace: the driver has another ID for it.
    is_in_pid_namespace: bool,
    /// Another process removes a device just before this command.
    vanishes_at: Option<UblkCommand>,
}

fn fail<T>(code: i32) -> io::Result<T> {
    Err(io::Error::from_raw_os_error(code))
}

impl FakeDriver {
    fn new() -> Self {
        Self { features: NEEDED, processes: vec![OWN], ..Self::default() }
    }

    fn with(mut self, id: u32, state: u16, server: i32, note: u64) -> Self {
        let info = UblkInfo { id, state, server, note, flags: NEEDED, ..UblkInfo::default() };
        let parameters = parameters(SIZE).to_bytes().to_vec();
        let made =
            FakeDevice { info, parameters, is_open: false, is_unfetched: false, is_used: false };
        self.devices.insert(id, made);
        self
    }

    fn device(&mut self, id: u32) -> io::Result<&mut FakeDevice> {
        self.devices.get_mut(&id).ok_or_else(|| io::Error::from_raw_os_error(errno::ENODEV))
    }

    fn add(&mut self, id: u32, buffer: &mut [u8]) -> io::Result<()> {
        let bytes = (&*buffer).try_into().expect("a device");
        let mut info = UblkInfo::from_bytes(bytes);
        assert_eq!(info.id, id);
        let lowest = (0..).find(|id| !self.devices.contains_key(id)).expect("a number");
        info.id = if id == ANY { lowest } else { id };
        info.flags &= self.features;
        if self.devices.contains_key(&info.id) {
            return fail(EXISTS);
        }
        buffer.copy_from_slice(&info.to_bytes());
        self.devices.insert(
            info.id,
            FakeDevice {
                info,
                parameters: Vec::new(),
                is_open: false,
                is_unfetched: false,
                is_used: false,
            },
        );
        Ok(())
    }
}

impl Control for FakeDriver {
    fn command(
        &mut self,
        command: UblkCommand,
        id: u32,
        argument: u64,
        buffer: &mut [u8],
    ) -> io::Result<()> {
        use UblkCommand as C;
        if !matches!(command, C::GetFeatures | C::GetInfo | C::GetParameters) {
            self.changes.push((command, id));
        }
        if self.refused == Some(command) {
            return fail(errno::EINVAL);
        }
        if self.vanishes_at == Some(command) {
            self.devices.remove(&id);
        }
        match command {
            C::GetFeatures => buffer.copy_from_slice(&self.features.to_ne_bytes()),
            C::Add => self.add(id, buffer)?,
            C::GetInfo => buffer.copy_from_slice(&self.device(id)?.info.to_bytes()),
            C::SetParameters => self.device(id)?.parameters = buffer.to_vec(),
            C::GetParameters => buffer.copy_from_slice(&self.device(id)?.parameters),
            C::Delete | C::DeleteAsync => {
                if !self.device(id)?.is_used {
                    self.devices.remove(&id);
                }
            }
            C::Stop if self.cancelled_stops > 0 => {
                self.cancelled_stops -= 1;
                return fail(errno::ECANCELED);
            }
            C::Stop => {
                let info = &mut self.device(id)?.info;
                (info.state, info.server) = (ublk_state::DEAD, -1);
            }
            C::Start | C::EndRecovery if self.is_in_pid_namespace => return fail(errno::EINVAL),
            C::Start | C::EndRecovery => {
                let info = &mut self.device(id)?.info;
                info.state = ublk_state::LIVE;
                info.server = argument as i32;
            }
            C::StartRecovery => {
                let device = self.device(id)?;
                if device.is_unfetched {
                    return fail(errno::EINVAL);
                }
                if device.is_open || device.info.state != ublk_state::QUIESCED {
                    return fail(BUSY);
                }
            }
            C::UpdateSize => {}
        }
        Ok(())
    }

    /// A deletion completes within the time only if nothing uses the device.
    fn command_within(
        &mut self,
        command: UblkCommand,
        id: u32,
        _: Duration,
    ) -> io::Result<Option<()>> {
        self.command(command, id, 0, &mut [])?;
        Ok((!self.devices.contains_key(&id)).then_some(()))
    }

    fn is_in_pid_namespace(&self) -> bool {
        self.is_in_pid_namespace
    }

    fn process_exists(&self, process: i32) -> bool {
        self.processes.contains(&process)
    }

    fn has_open(&self, process: i32, id: u32) -> bool {
        let device = self.devices.get(&id);
        device.is_some_and(|device| device.is_open && device.info.server == process)
    }

    fn pause(&mut self) {
        self.pauses += 1;
        if let Some(event) = self.events.get(&self.pauses).copied() {
            event(self);
        }
    }
}

fn wanted(id: Option<u32>) -> Wanted {
    Wanted {
        id,
        queues: 2,
        depth: 128,
        max_io_bytes: 512 << 10,
        server: OWN,
        note: note_of("/image"),
        parameters: parameters(SIZE),
        takes_pages: true,
    }
}

fn own_note() -> u64 {
    note_of("/image")
}

#[test]
fn a_new_device_gets_its_number_and_its_parameters() {
    let mut driver = FakeDriver::new().with(0, ublk_state::LIVE, OTHER, 1);
    let acquired = acquire(&mut driver, &wanted(None)).expect("a device");
    assert_eq!((acquired.id, acquired.origin), (1, Origin::Added));
    let device = driver.devices[&1].clone();
    assert_eq!(device.parameters, parameters(SIZE).to_bytes());
    assert_eq!((device.info.queues, device.info.depth), (2, 128));
    assert_eq!((device.info.note, device.info.server), (own_note(), OWN));
    start(&mut driver, &acquired, OWN).expect("it starts");
    assert_eq!(driver.devices[&1].info.state, ublk_state::LIVE);
    stop(&mut driver, 1).expect("it stops");
    delete(&mut driver, 1).expect("it goes");
    assert_eq!(driver.devices.len(), 1);

    let named = acquire(&mut driver, &wanted(Some(7))).expect("a device");
    assert_eq!((named.id, named.origin), (7, Origin::Added));
}

#[test]
fn a_device_whose_server_was_killed_goes_on() {
    // The rest of the server has the device open until the second check.
    let mut driver = FakeDriver::new().with(3, ublk_state::LIVE, OTHER, own_note());
    driver.processes.push(OTHER);
    driver.device(3).expect("it is there").is_open = true;
    driver.events.insert(2, |driver| driver.processes.retain(|id| *id != OTHER));
    driver.events.insert(4, |driver| {
        driver.device(3).expect("it is there").info.state = ublk_state::QUIESCED;
    });
    driver.events.insert(6, |driver| driver.device(3).expect("it is there").is_open = false);
    let acquired = acquire(&mut driver, &wanted(Some(3))).expect("it goes on");
    assert_eq!((acquired.id, acquired.origin), (3, Origin::Recovered));
    assert_eq!(driver.pauses, 6);
    start(&mut driver, &acquired, OWN).expect("it goes on");
    let info = driver.devices[&3].info;
    assert_eq!((info.state, info.server), (ublk_state::LIVE, OWN));
    let only = |command: &(UblkCommand, u32)| {
        matches!(command.0, UblkCommand::StartRecovery | UblkCommand::EndRecovery)
    };
    assert!(driver.changes.iter().all(only), "{:?}", driver.changes);
}

#[test]
fn a_device_that_is_served_is_not_touched() {
    let mut driver = FakeDriver::new().with(3, ublk_state::LIVE, OTHER, own_note());
    driver.processes.push(OTHER);
    let error = acquire(&mut driver, &wanted(Some(3))).expect_err("it is in use");
    assert!(matches!(error, Error::InUse { id: 3, server: OTHER }), "{error}");
    assert_eq!((driver.pauses, driver.changes.len()), (MAX_PAUSES_OF_SERVER, 0));
}

#[test]
fn a_device_that_nothing_releases_is_waited_for_with_an_end() {
    let mut driver = FakeDriver::new().with(3, ublk_state::LIVE, OTHER, own_note());
    let error = acquire(&mut driver, &wanted(Some(3))).expect_err("it is not released");
    assert!(matches!(error, Error::NotReleased { id: 3, server: OTHER }), "{error}");
    assert_eq!((driver.pauses, driver.changes.len()), (MAX_PAUSES, 0));
}

#[test]
fn a_device_of_another_image_or_program_is_not_touched() {
    for state in [ublk_state::QUIESCED, ublk_state::DEAD, ublk_state::LIVE] {
        let other = note_of("/another");
        let mut driver = FakeDriver::new().with(3, state, OTHER, other).with(4, state, OTHER, 0);
        let error = acquire(&mut driver, &wanted(Some(3))).expect_err("another image");
        match state {
            ublk_state::QUIESCED => {
                assert!(matches!(error, Error::OtherImage { id: 3 }), "{error}")
            }
            _ => assert!(matches!(error, Error::OtherServed { id: 3 }), "{error}"),
        }
        let error = acquire(&mut driver, &wanted(Some(4))).expect_err("another program");
        assert!(matches!(error, Error::Foreign { id: 4 }), "{error}");
        let error = remove_unserved(&mut driver, 4).expect_err("another program");
        assert!(matches!(error, Error::Foreign { id: 4 }), "{error}");
        assert_eq!(driver.changes, []);
    }
}

#[test]
fn a_device_that_was_never_started_is_made_anew() {
    let mut driver = FakeDriver::new().with(3, ublk_state::DEAD, OTHER, own_note());
    let acquired = acquire(&mut driver, &wanted(Some(3))).expect("a new device");
    assert_eq!((acquired.id, acquired.origin), (3, Origin::Added));
    assert_eq!(driver.changes[0].0, UblkCommand::DeleteAsync);
}

#[test]
fn a_size_that_changed_is_followed_or_refused() {
    let mut driver = FakeDriver::new().with(3, ublk_state::QUIESCED, OTHER, own_note());
    let longer = Wanted { parameters: parameters(2 * SIZE), ..wanted(Some(3)) };
    let error = acquire(&mut driver, &longer).expect_err("it cannot follow");
    assert!(matches!(error, Error::Changed { id: 3, .. }), "{error}");
    assert_eq!(driver.changes, []);
    driver.device(3).expect("it is there").info.flags |= ublk_flag::UPDATE_SIZE;
    let acquired = acquire(&mut driver, &longer).expect("it can follow");
    assert_eq!(acquired.parameters.size, SIZE);
}

#[test]
fn a_device_that_transfers_data_in_an_unknown_way_is_not_taken_over() {
    let mut driver = FakeDriver::new().with(3, ublk_state::LIVE, OTHER, own_note());
    for (flags, is_known) in [
        (0, true),
        (ublk_flag::PAGES, true),
        (ublk_flag::USER_COPY, false),
        (ublk_flag::BATCH_IO, false),
        (ublk_flag::PAGES | ublk_flag::SUPPORT_ZERO_COPY, false),
    ] {
        driver.device(3).expect("it is there").info.flags = NEEDED | flags;
        assert_eq!(check_device(&mut driver, 3, own_note()).is_ok(), is_known, "{flags:#x}");
    }
    assert_eq!(driver.changes, []);
}

#[test]
fn a_new_device_leaves_data_in_the_pages_if_disk_and_driver_can() {
    let flags = |features: u64, takes_pages| {
        let mut driver = FakeDriver { features: NEEDED | features, ..FakeDriver::new() };
        let wanted = Wanted { takes_pages, ..wanted(None) };
        let acquired = acquire(&mut driver, &wanted).expect("a device");
        driver.device(acquired.id).expect("it is there").info.flags & ublk_flag::PAGES
    };
    assert_eq!(flags(NEEDED_FOR_PAGES, true), ublk_flag::PAGES);
    assert_eq!(flags(NEEDED_FOR_PAGES, false), 0);
    assert_eq!(flags(ublk_flag::PAGES, true), 0, "Linux 6.16");
    // Linux 6.12 has only this one.
    assert_eq!(flags(ublk_flag::USER_COPY, true), 0);
}

#[test]
fn an_old_driver_is_refused() {
    let mut driver = FakeDriver { features: ublk_flag::CMD_IOCTL_ENCODE, ..FakeDriver::new() };
    assert!(matches!(acquire(&mut driver, &wanted(None)), Err(Error::TooOld)));
    let refused = Some(UblkCommand::GetFeatures);
    let mut driver = FakeDriver { refused, ..FakeDriver::new() };
    assert!(matches!(acquire(&mut driver, &wanted(None)), Err(Error::TooOld)));
    assert_eq!(driver.changes, []);
}

#[test]
fn a_device_that_cannot_be_set_up_is_removed() {
    let refused = Some(UblkCommand::SetParameters);
    let mut driver = FakeDriver { refused, ..FakeDriver::new() };
    let error = acquire(&mut driver, &wanted(None)).expect_err("it is refused");
    assert!(matches!(error, Error::Refused { id: 0, .. }), "{error}");
    assert!(driver.devices.is_empty());
}

#[test]
fn only_a_device_without_a_server_is_removed() {
    let mut driver = FakeDriver::new().with(3, ublk_state::QUIESCED, OTHER, own_note());
    remove_unserved(&mut driver, 3).expect("nobody serves it");
    assert!(driver.devices.is_empty());
    assert!(matches!(remove_unserved(&mut driver, 3), Err(Error::Missing { id: 3 })));
    let mut driver = FakeDriver::new().with(3, ublk_state::LIVE, OTHER, own_note());
    driver.processes.push(OTHER);
    assert!(matches!(remove_unserved(&mut driver, 3), Err(Error::InUse { id: 3, server: OTHER })));
    assert_eq!(driver.devices.len(), 1);
}

#[test]
fn an_older_driver_removes_at_once() {
    let refused = Some(UblkCommand::DeleteAsync);
    let fake = FakeDriver::new().with(3, ublk_state::QUIESCED, OTHER, own_note());
    let mut driver = FakeDriver { refused, ..fake };
    remove_unserved(&mut driver, 3).expect("it goes");
    assert!(driver.devices.is_empty());
}

#[test]
fn an_older_driver_is_not_waited_for_while_the_block_device_is_open() {
    let refused = Some(UblkCommand::DeleteAsync);
    let fake = FakeDriver::new().with(3, ublk_state::DEAD, -1, own_note());
    let mut driver = FakeDriver { refused, ..fake };
    driver.devices.get_mut(&3).expect("it is there").is_used = true;
    delete(&mut driver, 3).expect("it goes when it is closed");
    assert_eq!(driver.changes.last(), Some(&(UblkCommand::Delete, 3)));
}

#[test]
fn a_stop_that_no_worker_could_carry_out_is_repeated_for_a_bounded_time() {
    let live = || FakeDriver::new().with(3, ublk_state::LIVE, OWN, own_note());
    let mut driver = FakeDriver { cancelled_stops: 20, ..live() };
    stop(&mut driver, 3).expect("it stops at last");
    assert_eq!((driver.pauses, driver.devices[&3].info.state), (20, ublk_state::DEAD));
    let mut driver = FakeDriver { cancelled_stops: u32::MAX, ..live() };
    assert!(matches!(stop(&mut driver, 3), Err(Error::Refused { what: "stop", id: 3, .. })));
    assert_eq!(driver.pauses, MAX_PAUSES);
    // Another refusal is final.
    let mut driver = FakeDriver { refused: Some(UblkCommand::Stop), ..live() };
    stop(&mut driver, 3).expect_err("it is refused");
    assert_eq!(driver.pauses, 0);
}

#[test]
fn a_refused_start_in_a_pid_namespace_names_its_cause() {
    for (origin, what) in [(Origin::Added, "start"), (Origin::Recovered, "go on with")] {
        let mut driver = FakeDriver::new().with(3, ublk_state::DEAD, OWN, own_note());
        driver.is_in_pid_namespace = true;
        let acquired = Acquired { id: 3, origin, parameters: parameters(SIZE) };
        let error = start(&mut driver, &acquired, OWN).expect_err("another process is meant");
        assert!(error.to_string().contains(what), "{error}");
        assert!(error.to_string().contains("PID namespace"), "{error}");
    }
}

#[test]
fn a_device_that_was_stopped_and_not_removed_is_made_anew() {
    // The driver forgets the server of a device that was stopped.
    let mut driver = FakeDriver::new().with(3, ublk_state::DEAD, -1, own_note());
    let acquired = acquire(&mut driver, &wanted(Some(3))).expect("a new device");
    assert_eq!((acquired.id, acquired.origin), (3, Origin::Added));
    assert_eq!(driver.changes[0], (UblkCommand::DeleteAsync, 3));
}

#[test]
fn a_removed_device_that_is_open_is_waited_for_with_an_end_that_blames_no_process() {
    let removed = || {
        let mut driver = FakeDriver::new().with(3, ublk_state::DEAD, -1, own_note());
        driver.device(3).expect("it is there").is_used = true;
        driver
    };
    let mut driver = removed();
    let error = acquire(&mut driver, &wanted(Some(3))).expect_err("it is mounted");
    assert!(matches!(error, Error::StillOpen { id: 3 }), "{error}");
    assert_eq!((driver.pauses, driver.changes.len()), (MAX_PAUSES_OF_SERVER, 1));
    // The device is unmounted meanwhile.
    let mut driver = removed();
    driver.events.insert(5, |driver| drop(driver.devices.remove(&3)));
    acquire(&mut driver, &wanted(Some(3))).expect("a new device");
    remove_unserved(&mut removed(), 3).expect("it goes when it is unmounted");
}

#[test]
fn a_device_that_was_never_started_is_not_blamed_on_another_process() {
    // The ID of the process that made it belongs to another process now.
    let mut driver = FakeDriver::new().with(3, ublk_state::DEAD, OTHER, own_note());
    driver.processes.push(OTHER);
    let error = acquire(&mut driver, &wanted(Some(3))).expect_err("it may be about to start");
    assert!(matches!(error, Error::NotStarted { id: 3, server: OTHER }), "{error}");
    assert_eq!(driver.changes, []);
    remove_unserved(&mut driver, 3).expect("as the error says");
    assert!(driver.devices.is_empty());
    // A process that has the device open is starting it.
    let mut driver = FakeDriver::new().with(3, ublk_state::DEAD, OTHER, own_note());
    driver.processes.push(OTHER);
    driver.device(3).expect("it is there").is_open = true;
    let error = acquire(&mut driver, &wanted(Some(3))).expect_err("it starts");
    assert!(matches!(error, Error::InUse { id: 3, server: OTHER }), "{error}");
    let error = remove_unserved(&mut driver, 3).expect_err("it starts");
    assert!(matches!(error, Error::InUse { id: 3, server: OTHER }), "{error}");
}

#[test]
fn a_device_of_unknown_flags_is_left_as_it_is() {
    let mut driver = FakeDriver::new().with(3, ublk_state::QUIESCED, OTHER, own_note());
    driver.device(3).expect("it is there").info.flags |= ublk_flag::NEED_GET_DATA;
    acquire(&mut driver, &wanted(Some(3))).expect_err("its data goes another way");
    assert_eq!(driver.changes, []);
    assert_eq!(driver.devices[&3].info.state, ublk_state::QUIESCED);
}

#[test]
fn a_recovery_that_was_cut_off_goes_on_as_it_is() {
    let mut driver = FakeDriver::new().with(3, ublk_state::QUIESCED, OTHER, own_note());
    driver.device(3).expect("it is there").is_unfetched = true;
    let acquired = acquire(&mut driver, &wanted(Some(3))).expect("it goes on");
    assert_eq!((acquired.id, acquired.origin), (3, Origin::RecoveredAgain));
    start(&mut driver, &acquired, OWN).expect("it goes on");
    assert_eq!(driver.devices[&3].info.state, ublk_state::LIVE);
}

#[test]
fn a_device_that_another_process_removes_meanwhile_is_removed() {
    let refuse = |command| {
        let mut driver = FakeDriver::new().with(3, ublk_state::QUIESCED, OTHER, own_note());
        driver.vanishes_at = Some(command);
        driver
    };
    for command in [UblkCommand::Stop, UblkCommand::DeleteAsync] {
        let mut driver = refuse(command);
        remove_unserved(&mut driver, 3).expect("it is gone");
        assert!(driver.devices.is_empty());
    }
}

#[test]
fn a_size_is_asked_for_where_there_is_a_block_device() {
    let update = |driver: &mut FakeDriver| update_size(driver, 3, 2 * SIZE / 512);
    let mut driver = FakeDriver::new().with(3, ublk_state::LIVE, OWN, own_note());
    update(&mut driver).expect("it is live");
    assert_eq!(driver.changes, [(UblkCommand::UpdateSize, 3)]);
    // The kernel would crash.
    let mut driver = FakeDriver::new().with(3, ublk_state::DEAD, -1, own_note());
    assert!(matches!(update(&mut driver), Err(Error::Missing { id: 3 })));
    assert_eq!(driver.changes, []);
    assert!(matches!(update(&mut FakeDriver::new()), Err(Error::Missing { id: 3 })));
}

#[test]
fn a_new_device_can_change_its_size_where_the_driver_can() {
    let mut old = FakeDriver::new();
    acquire(&mut old, &wanted(None)).expect("a device");
    assert_eq!(old.devices[&0].info.flags, NEEDED);
    let mut new = FakeDriver { features: NEEDED | WISHED | 1 << 0, ..FakeDriver::new() };
    acquire(&mut new, &wanted(None)).expect("a device");
    assert_eq!(new.devices[&0].info.flags, NEEDED | WISHED, "nothing that was not asked for");
}

#[test]
fn numbers_that_are_no_process_are_none() {
    for number in [-1, 0, i32::MIN] {
        assert_eq!(pid(number), None);
    }
    assert!(pid(1).is_some());
}
