//! Llama in ordinary Burn style, with every technique of `burn-context-parallel` and `burn-upipe` a switch.
//!
//! The model is single-device code; [`ParallelConfig`] and [`parallelize`] say what is done to it. Weights come from a Hugging
//! Face folder and go back to one.
//!
//! ```
//! use burn::optim::GradientsParams;
//! use burn::tensor::Device;
//! use burn_context_parallel::group::ProcessGroup;
//! use burn_context_parallel::sequence::{Batch, SequenceLayout};
//! use llama::{Llama, LlamaConfig, ParallelConfig, load};
//!
//! let device = Device::flex().autodiff();
//! let model = Llama::init(&LlamaConfig::new(32, 16, 40, 2, 4, 2), &ParallelConfig::all(), &device)?;
//!
//! let batch = Batch::from_rows(&[vec![5, 6, 7, 8, 9]])?;
//! let shard = batch.shard(&SequenceLayout::contiguous(5, 1)?, 0, &device)?;
//! let loss = model.loss(&shard, &ProcessGroup::single())?;
//! assert_eq!(loss.valid, 4);
//! let grads = GradientsParams::from_grads(loss.mean.backward(), &model);
//! assert_eq!(grads.len(), 21);
//!
//! let folder = std::env::temp_dir().join("llama-front-page");
//! model.save(&folder)?;
//! let (_, report) = load(&folder, &ParallelConfig::none(), &device)?;
//! assert_eq!(report.applied.len(), 21);
//! # std::fs::remove_dir_all(&folder).ok();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Limits
//!
//! The families of [`Family`], rotary scaling "default", "linear", "llama3" or "yarn", safetensors. What a folder asks for beyond
//! that is [`LlamaError::Unsupported`], never ignored.

mod block;
mod config;
pub mod device;
mod error;
mod files;
mod finite;
mod folder;
mod load;
mod model;
mod names;
mod optim;
mod parallel;
pub mod precision;
mod save;
mod shards;

pub use block::{Block, Mlp};
pub use burn_context_parallel::sequence::RotaryScaling;
pub use config::{Family, LlamaConfig};
pub use device::{DeviceChoice, DeviceError, DeviceList, Devices};
pub use error::{LlamaError, Result};
pub use files::SafetensorsHeader;
pub use finite::not_finite;
pub use folder::{FolderWeights, FolderWriter};
pub use load::{LoadReport, Missing, load, load_as};
pub use model::Llama;
pub use names::{hf_name, named_gradients};
pub use optim::{adamw, adamw_rule, clip_grad_norm};
pub use parallel::{AttentionScheme, ParallelConfig, parallelize};
