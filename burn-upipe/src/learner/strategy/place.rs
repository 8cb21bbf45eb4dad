//! Where a rank stands.

use burn::tensor::Device;
use burn_context_parallel::Result;
use burn_context_parallel::group::{Axis, Mesh, MeshShape, ProcessGroup};

/// A rank's place in the mesh, and its device.
#[derive(Clone, Debug)]
pub struct Place {
    mesh: Mesh,
    sequence: ProcessGroup,
    device: Device,
}

impl Place {
    /// The place of this rank of `world`.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](burn_context_parallel::Error::Invalid) if the shape is not of as many ranks.
    pub fn new(world: &ProcessGroup, shape: MeshShape, device: Device) -> Result<Self> {
        let mesh = Mesh::new(world, shape)?;
        let sequence = mesh.over(&[Axis::Ring, Axis::Ulysses])?;
        Ok(Self { mesh, sequence, device })
    }

    /// All ranks.
    pub fn world(&self) -> &ProcessGroup {
        self.mesh.world()
    }

    /// All ranks, by axis.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// The ranks that share this one's sequences.
    pub fn sequence(&self) -> &ProcessGroup {
        &self.sequence
    }

    /// The device on which parts of items are made: with autodiff in training, without in validation.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The same place for validation.
    pub(super) fn without_autodiff(&self) -> Self {
        Self { device: self.device.clone().inner(), ..self.clone() }
    }
}
