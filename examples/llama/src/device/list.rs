//! Several devices, dealt out to ranks.

use std::fmt;
use std::str::FromStr;

use burn::tensor::{DType, Device};

use super::{DeviceChoice, DeviceError, Runtime};

/// One or more devices of one runtime, none of them twice; rank r takes number r modulo their count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceList(Vec<DeviceChoice>);

impl DeviceList {
    /// How many there are, at least one.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// What runs them.
    pub fn runtime(&self) -> Runtime {
        self.0[0].runtime()
    }

    /// The device of a rank.
    pub fn of_rank(&self, rank: usize) -> DeviceChoice {
        self.0[rank % self.0.len()]
    }

    /// Checks that this program has their runtime; opens nothing.
    ///
    /// # Errors
    ///
    /// [`DeviceError::NotCompiled`].
    pub fn expect_compiled_in(&self) -> Result<(), DeviceError> {
        match self.runtime() {
            runtime if runtime.is_compiled_in() => Ok(()),
            runtime => Err(DeviceError::NotCompiled { runtime }),
        }
    }

    /// All of them, as [`DeviceChoice::open`] does it.
    ///
    /// # Errors
    ///
    /// That of the first device that cannot be had.
    pub fn open(&self) -> Result<Devices, DeviceError> {
        let devices = self.0.iter().map(|device| device.open()).collect::<Result<_, _>>()?;
        Ok(Devices { list: self.clone(), devices })
    }
}

impl Default for DeviceList {
    fn default() -> Self {
        Self(vec![DeviceChoice::FLEX])
    }
}

impl From<DeviceChoice> for DeviceList {
    fn from(device: DeviceChoice) -> Self {
        Self(vec![device])
    }
}

impl FromStr for DeviceList {
    type Err = DeviceError;

    fn from_str(text: &str) -> Result<Self, DeviceError> {
        let devices = text.split(',').map(|device| device.trim().parse()).collect::<Result<Vec<DeviceChoice>, _>>()?;
        for (at, device) in devices.iter().enumerate() {
            if device.runtime() != devices[0].runtime() {
                let problem = format!("{} and {device} in one list", devices[0]);
                return Err(DeviceError::List { problem, remedy: "use devices of one kind" });
            }
            if devices[..at].contains(device) {
                let problem = format!("{device} is listed twice");
                return Err(DeviceError::List { problem, remedy: "list it once: ranks that come in turn share it" });
            }
        }
        Ok(Self(devices))
    }
}

impl fmt::Display for DeviceList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, device) in self.0.iter().enumerate() {
            write!(f, "{}{device}", if at > 0 { "," } else { "" })?;
        }
        Ok(())
    }
}

/// A [`DeviceList`], open.
#[derive(Clone, Debug)]
pub struct Devices {
    list: DeviceList,
    devices: Vec<Device>,
}

impl Devices {
    /// What they were asked for as.
    pub fn list(&self) -> &DeviceList {
        &self.list
    }

    /// All of them, in order; at least one.
    pub fn all(&self) -> &[Device] {
        &self.devices
    }

    /// The device of a rank.
    pub fn of_rank(&self, rank: usize) -> &Device {
        &self.devices[rank % self.devices.len()]
    }

    /// The same devices, with autodiff.
    pub fn autodiff(self) -> Self {
        let Self { list, devices } = self;
        Self { list, devices: devices.into_iter().map(Device::autodiff).collect() }
    }

    /// Checks that all of them compute in a type.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Type`] of the first that does not.
    pub fn expect_dtype(&self, dtype: DType) -> Result<(), DeviceError> {
        let mut all = self.list.0.iter().zip(&self.devices);
        all.try_for_each(|(choice, device)| choice.expect_dtype(device, dtype))
    }
}
