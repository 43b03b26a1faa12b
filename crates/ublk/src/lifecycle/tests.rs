//! The steps, with a driver made of a map: it answers as `ublk_drv.c` does.

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
}

#[derive(Default)]
struct FakeDriver {
    features: u64,
    devices: BTreeMap<u32, FakeDevice>,
    processes: Vec<i32>,
    /// Commands that change something.
    changes: Vec<(UblkCommand, u32)>,
    pauses: u32,
    /// What happens at this pause.
    events: BTreeMap<u32, fn(&mut FakeDriver)>,
    refused: Option<UblkCommand>,
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
        self.devices.insert(id, FakeDevice { info, parameters, is_open: false });
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
        let (parameters, is_open) = (Vec::new(), false);
        self.devices.insert(info.id, FakeDevice { info, parameters, is_open });
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
        match command {
            C::GetFeatures => buffer.copy_from_slice(&self.features.to_ne_bytes()),
            C::Add => self.add(id, buffer)?,
            C::GetInfo => buffer.copy_from_slice(&self.device(id)?.info.to_bytes()),
            C::SetParameters => self.device(id)?.parameters = buffer.to_vec(),
            C::GetParameters => buffer.copy_from_slice(&self.device(id)?.parameters),
            C::Delete | C::DeleteAsync => {
                self.device(id)?;
                self.devices.remove(&id);
            }
            C::Stop => self.device(id)?.info.state = ublk_state::DEAD,
            C::Start | C::EndRecovery => {
                let info = &mut self.device(id)?.info;
                info.state = ublk_state::LIVE;
                info.server = argument as i32;
            }
            C::StartRecovery => {
                let device = self.device(id)?;
                if device.is_open || device.info.state != ublk_state::QUIESCED {
                    return fail(BUSY);
                }
            }
            C::UpdateSize => {}
        }
        Ok(())
    }

    fn process_exists(&self, process: i32) -> bool {
        self.processes.contains(&process)
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
    // What is left of the server has the device open until the second look.
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
