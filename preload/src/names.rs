//! The driver's functions that this library stands in front of, in one list.

/// Calls a macro with three lists: functions of at most six arguments that pass the gate, such functions of more, and
/// those that this library does something about.
macro_rules! all_symbols {
    ($then:ident) => {
        $then! {
            six:
                cuGraphLaunch cuGraphLaunch_ptsz cuGraphUpload cuGraphUpload_ptsz
                cuLaunchKernelEx cuLaunchKernelEx_ptsz cuLaunchHostFunc cuLaunchHostFunc_ptsz
                cuLaunchHostFunc_v2 cuLaunchHostFunc_v2_ptsz cuLaunchCooperativeKernelMultiDevice
                cuLaunch cuLaunchGrid cuLaunchGridAsync
                cuMemcpy cuMemcpy_ptds cuMemcpyAsync cuMemcpyAsync_ptsz
                cuMemcpyPeer cuMemcpyPeer_ptds cuMemcpyPeerAsync cuMemcpyPeerAsync_ptsz
                cuMemcpyHtoD_v2 cuMemcpyHtoD_v2_ptds cuMemcpyHtoDAsync_v2 cuMemcpyHtoDAsync_v2_ptsz
                cuMemcpyDtoH_v2 cuMemcpyDtoH_v2_ptds cuMemcpyDtoHAsync_v2 cuMemcpyDtoHAsync_v2_ptsz
                cuMemcpyDtoD_v2 cuMemcpyDtoD_v2_ptds cuMemcpyDtoDAsync_v2 cuMemcpyDtoDAsync_v2_ptsz
                cuMemcpyDtoA_v2 cuMemcpyDtoA_v2_ptds cuMemcpyAtoD_v2 cuMemcpyAtoD_v2_ptds
                cuMemcpyHtoA_v2 cuMemcpyHtoA_v2_ptds cuMemcpyHtoAAsync_v2 cuMemcpyHtoAAsync_v2_ptsz
                cuMemcpyAtoH_v2 cuMemcpyAtoH_v2_ptds cuMemcpyAtoHAsync_v2 cuMemcpyAtoHAsync_v2_ptsz
                cuMemcpyAtoA_v2 cuMemcpyAtoA_v2_ptds
                cuMemcpy2D_v2 cuMemcpy2D_v2_ptds cuMemcpy2DUnaligned_v2 cuMemcpy2DUnaligned_v2_ptds
                cuMemcpy2DAsync_v2 cuMemcpy2DAsync_v2_ptsz
                cuMemcpy3D_v2 cuMemcpy3D_v2_ptds cuMemcpy3DAsync_v2 cuMemcpy3DAsync_v2_ptsz
                cuMemcpy3DPeer cuMemcpy3DPeer_ptds cuMemcpy3DPeerAsync cuMemcpy3DPeerAsync_ptsz
                cuMemsetD8_v2 cuMemsetD8_v2_ptds cuMemsetD8Async cuMemsetD8Async_ptsz
                cuMemsetD16_v2 cuMemsetD16_v2_ptds cuMemsetD16Async cuMemsetD16Async_ptsz
                cuMemsetD32_v2 cuMemsetD32_v2_ptds cuMemsetD32Async cuMemsetD32Async_ptsz
                cuMemsetD2D8_v2 cuMemsetD2D8_v2_ptds cuMemsetD2D8Async cuMemsetD2D8Async_ptsz
                cuMemsetD2D16_v2 cuMemsetD2D16_v2_ptds cuMemsetD2D16Async cuMemsetD2D16Async_ptsz
                cuMemsetD2D32_v2 cuMemsetD2D32_v2_ptds cuMemsetD2D32Async cuMemsetD2D32Async_ptsz
                cuMemAllocAsync cuMemAllocAsync_ptsz cuMemAllocFromPoolAsync cuMemAllocFromPoolAsync_ptsz
                cuMemcpy3DBatchAsync_v2 cuMemcpy3DBatchAsync_v2_ptsz
                cuMemcpyWithAttributesAsync cuMemcpyWithAttributesAsync_ptsz
                cuMemcpy3DWithAttributesAsync cuMemcpy3DWithAttributesAsync_ptsz
                cuMemDiscardBatchAsync cuMemDiscardBatchAsync_ptsz cuMemBatchDecompressAsync cuMemBatchDecompressAsync_ptsz
                cuMemPrefetchAsync cuMemPrefetchAsync_ptsz cuMemPrefetchAsync_v2 cuMemPrefetchAsync_v2_ptsz
                cuStreamAddCallback cuStreamAddCallback_ptsz cuStreamWaitEvent cuStreamWaitEvent_ptsz
                cuStreamWaitValue32 cuStreamWaitValue32_ptsz cuStreamWaitValue64 cuStreamWaitValue64_ptsz
                cuStreamWriteValue32 cuStreamWriteValue32_ptsz cuStreamWriteValue64 cuStreamWriteValue64_ptsz
                cuStreamWaitValue32_v2 cuStreamWaitValue32_v2_ptsz cuStreamWaitValue64_v2 cuStreamWaitValue64_v2_ptsz
                cuStreamWriteValue32_v2 cuStreamWriteValue32_v2_ptsz cuStreamWriteValue64_v2 cuStreamWriteValue64_v2_ptsz
                cuStreamBatchMemOp cuStreamBatchMemOp_ptsz cuStreamBatchMemOp_v2 cuStreamBatchMemOp_v2_ptsz
                cuSignalExternalSemaphoresAsync cuSignalExternalSemaphoresAsync_ptsz
                cuWaitExternalSemaphoresAsync cuWaitExternalSemaphoresAsync_ptsz
                cuPointerGetAttribute cuPointerGetAttributes cuPointerSetAttribute cuMemGetAccess
                cuTexObjectCreate cuTexRefSetAddress_v2 cuTexRefSetAddress2D_v3
                cuGraphAddNode cuGraphAddNode_v2 cuGraphAddMemcpyNode cuGraphAddMemsetNode
                cuGraphMemcpyNodeSetParams cuGraphMemsetNodeSetParams cuGraphNodeSetParams cuGraphExecNodeSetParams
                cuGraphExecMemcpyNodeSetParams cuGraphExecMemsetNodeSetParams cuGraphExecUpdate cuGraphExecUpdate_v2
                cuGraphInstantiate_v2 cuGraphInstantiateWithFlags cuGraphInstantiateWithParams cuGraphInstantiateWithParams_ptsz;
            many:
                cuLaunchKernel cuLaunchKernel_ptsz cuLaunchCooperativeKernel cuLaunchCooperativeKernel_ptsz
                cuMemcpyBatchAsync cuMemcpyBatchAsync_ptsz cuMemcpy3DBatchAsync cuMemcpy3DBatchAsync_ptsz
                cuMemcpyBatchAsync_v2 cuMemcpyBatchAsync_v2_ptsz cuMemPrefetchBatchAsync cuMemPrefetchBatchAsync_ptsz
                cuMemDiscardAndPrefetchBatchAsync cuMemDiscardAndPrefetchBatchAsync_ptsz;
            own:
                cuInit cuGetProcAddress cuGetProcAddress_v2
                cuMemAlloc_v2 cuMemAllocPitch_v2 cuMemFree_v2 cuMemGetAddressRange_v2
                cuMemFreeAsync cuMemFreeAsync_ptsz cuMemGetHandleForAddressRange cuStreamDestroy_v2
                cuMemCreate cuMemRelease cuMemMap cuMemUnmap cuMemSetAccess cuMemRetainAllocationHandle
                cuMemExportToShareableHandle cuMemGetAllocationPropertiesFromHandle
                cuMulticastCreate cuMulticastBindMem cuMulticastBindMem_v2 cuMulticastBindAddr cuMulticastBindAddr_v2
                cuCtxCreate cuCtxCreate_v2 cuCtxCreate_v3 cuCtxCreate_v4 cuCtxDestroy cuCtxDestroy_v2
                cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease cuDevicePrimaryCtxRelease_v2
                cuDevicePrimaryCtxReset cuDevicePrimaryCtxReset_v2 cuGreenCtxCreate cuGreenCtxDestroy
                cuCtxEnablePeerAccess
                cuMemImportFromShareableHandle cuIpcGetMemHandle cuIpcOpenMemHandle_v2 cuIpcCloseMemHandle
                cuStreamBeginCapture_v2 cuStreamBeginCapture_v2_ptsz cuStreamBeginCaptureToGraph cuStreamBeginCaptureToGraph_ptsz
                cuStreamEndCapture cuStreamEndCapture_ptsz;
        }
    };
}
pub(crate) use all_symbols;
