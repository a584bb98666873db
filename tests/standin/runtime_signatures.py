"""The functions of the CUDA runtime that the tests call. multiring itself calls the driver only."""

from ctypes import POINTER, Structure, c_byte, c_float, c_int, c_long, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

_HANDLE = POINTER(c_void_p)


class IpcHandle(Structure):
    """cudaIpcMemHandle_t: the name of a block of device memory, for another process."""

    _fields_ = (("reserved", c_byte * 64),)


RUNTIME_SIGNATURES: dict[str, list[Any]] = {
    "cudaGetDeviceCount": [POINTER(c_int)],
    "cudaSetDevice": [c_int],
    "cudaGetDevice": [POINTER(c_int)],
    "cudaDeviceReset": [],
    "cudaDeviceSynchronize": [],
    "cudaDeviceGetStreamPriorityRange": [POINTER(c_int), POINTER(c_int)],
    "cudaRuntimeGetVersion": [POINTER(c_int)],
    "cudaGetLastError": [],
    "cudaPeekAtLastError": [],
    "cudaMalloc": [_HANDLE, c_size_t],
    "cudaFree": [c_void_p],
    "cudaMemGetInfo": [POINTER(c_size_t), POINTER(c_size_t)],
    "cudaMallocHost": [_HANDLE, c_size_t],
    "cudaFreeHost": [c_void_p],
    "cudaHostRegister": [c_void_p, c_size_t, c_uint],
    "cudaHostUnregister": [c_void_p],
    "cudaPointerGetAttributes": [c_void_p, c_void_p],
    "cudaMemcpy": [c_void_p, c_void_p, c_size_t, c_int],
    "cudaMemcpyAsync": [c_void_p, c_void_p, c_size_t, c_int, c_void_p],
    "cudaMemset": [c_void_p, c_int, c_size_t],
    "cudaMemsetAsync": [c_void_p, c_int, c_size_t, c_void_p],
    "cudaStreamCreateWithFlags": [_HANDLE, c_uint],
    "cudaStreamCreateWithPriority": [_HANDLE, c_uint, c_int],
    "cudaStreamDestroy": [c_void_p],
    "cudaStreamQuery": [c_void_p],
    "cudaStreamSynchronize": [c_void_p],
    "cudaStreamWaitEvent": [c_void_p, c_void_p, c_uint],
    "cudaLaunchHostFunc": [c_void_p, c_void_p, c_void_p],
    "cudaEventCreateWithFlags": [_HANDLE, c_uint],
    "cudaEventDestroy": [c_void_p],
    "cudaEventRecord": [c_void_p, c_void_p],
    "cudaEventQuery": [c_void_p],
    "cudaEventSynchronize": [c_void_p],
    "cudaEventElapsedTime": [POINTER(c_float), c_void_p, c_void_p],
    "cudaStreamBeginCapture": [c_void_p, c_int],
    "cudaStreamEndCapture": [c_void_p, _HANDLE],
    "cudaStreamIsCapturing": [c_void_p, POINTER(c_int)],
    "cudaThreadExchangeStreamCaptureMode": [POINTER(c_int)],
    "cudaGraphInstantiate": [_HANDLE, c_void_p, c_uint64],
    "cudaGraphLaunch": [c_void_p, c_void_p],
    "cudaGraphDestroy": [c_void_p],
    "cudaGraphExecDestroy": [c_void_p],
    "cudaIpcGetMemHandle": [c_void_p, c_void_p],
    "cudaIpcOpenMemHandle": [_HANDLE, IpcHandle, c_uint],
    "cudaIpcCloseMemHandle": [c_void_p],
    "cudaIpcGetEventHandle": [c_void_p, c_void_p],
}
RUNTIME_TEXTS: dict[str, list[Any]] = {"cudaGetErrorName": [c_int], "cudaGetErrorString": [c_int]}
# Functions of the driver that native/jax/device_arrays.cc calls.
DRIVER_OF_JAX: dict[str, list[Any]] = {
    "cuStreamGetCtx": [c_void_p, _HANDLE],
    "cuCtxPushCurrent_v2": [c_void_p],
    "cuCtxPopCurrent_v2": [_HANDLE],
    "cuMemHostAlloc": [_HANDLE, c_size_t, c_uint],
}
# Functions of the driver that multiring does not call, for the tests of the stand-in.
DRIVER_MORE: dict[str, list[Any]] = {
    "cuDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "cuMemFreeHost": [c_void_p],
    "cuStreamWaitValue32_v2": [c_void_p, c_uint64, c_uint, c_uint],
    "cuStreamWriteValue32_v2": [c_void_p, c_uint64, c_uint, c_uint],
}
# The tests' controls of the stand-ins.
CONTROLS: dict[str, list[Any]] = {
    "standin_fail": [c_int, c_int],
    "standin_fail_left": [],
    "standin_fail_on_stream": [c_void_p, c_int],
    "standin_fail_allocations": [c_int, c_int],
    "standin_host_waits": [],
    "standin_thread_waits": [],
    "standin_occupy": [c_void_p, c_long],
    "standin_memory_used": [c_int, POINTER(c_size_t)],
}
NCCL_CONTROLS: dict[str, list[Any]] = {
    "standin_nccl_fail": [c_void_p, c_int, c_int],
    "standin_nccl_write_late": [c_int],
    "standin_nccl_abort_waits": [],
}
NCCL_CONTROL_TEXTS: dict[str, list[Any]] = {"standin_nccl_reports": []}
# Functions of NCCL that multiring does not call, for the tests of the stand-in.
NCCL_MORE: dict[str, list[Any]] = {
    "ncclCommSplit": [c_void_p, c_int, c_int, _HANDLE, c_void_p],
    "ncclCommFinalize": [c_void_p],
    "ncclCommRegister": [c_void_p, c_void_p, c_size_t, _HANDLE],
    "ncclCommDeregister": [c_void_p, c_void_p],
    "ncclCommCount": [c_void_p, POINTER(c_int)],
    "ncclCommUserRank": [c_void_p, POINTER(c_int)],
    "ncclBcast": [c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclAlltoAll": [c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p],
    "ncclRedOpCreatePreMulSum": [POINTER(c_int), c_void_p, c_int, c_int, c_void_p],
    "ncclRedOpDestroy": [c_int, c_void_p],
}
