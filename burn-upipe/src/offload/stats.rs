//! What an engine has where.

/// Numbers of one engine: of its rank, of this moment, or the most since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OffloadStats {
    /// Tensors that are saved.
    pub saved: usize,
    /// Bytes of saved tensors that stay on the device: by policy, or for want of room.
    pub device_bytes: usize,
    /// Bytes of tensors in host memory.
    pub host_bytes: usize,
    /// The most of them.
    pub host_bytes_peak: usize,
    /// Bytes of host memory that were taken, free buffers among them: what the budget is about. Of memory that a device's backend
    /// gives (not on a CPU), the tensors' bytes: the backend may round them up, and keep what is free.
    pub host_reserved: usize,
    /// How often host memory was taken from the system; 0 where a device's backend gives it.
    pub allocations: usize,
    /// Bytes of tensors on disk.
    pub disk_bytes: u64,
    /// The most of them.
    pub disk_bytes_peak: u64,
    /// Tensors on the device because of offload: leaving, coming, or back.
    pub in_flight: usize,
    /// The most of them.
    pub in_flight_peak: usize,
    /// Tensors that were to leave and found no room.
    pub kept_on_device: usize,
}
